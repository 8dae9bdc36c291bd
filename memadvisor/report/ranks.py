"""How unlike the ranks are, and who holds the others up."""

from __future__ import annotations

from collections.abc import Sequence

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.skew import RankTimes, Skew
from memadvisor.report.blocks import MEASURED, Block, Figure, Missing, table
from memadvisor.report.words import bytes_scale, seconds_scale
from memadvisor.units import format_bytes, format_fraction, format_seconds

MAX_RANKS = 256
TITLE = "Ranks side by side"
_BASIS = "step time: median steady step; the rest: traced step"


def rank_skew(analysis: Analysis) -> Sequence[Block]:
    """Times and peaks of the ranks, and a table of the same."""
    skew = analysis.skew
    if skew is None:
        world_size = analysis.run.manifest.world_size
        why = "The run has one rank."
        if world_size > 1:
            why = f"Of {world_size} ranks only one left a readable record."
        absence = "Not recorded." if world_size > 1 else "Does not apply."
        return [Missing(name="skew", title=TITLE, why=why, absence=absence)]
    return [_figure(skew), _table(skew)]


def verdict(skew: Skew) -> str:
    """Who waits for whom, in a sentence."""
    if all(row.caused_waiting_s is None for row in skew.ranks):
        return "Who waits for whom is not recorded."
    if skew.straggler is None:
        return "No rank waits for another."
    caused = next(row.caused_waiting_s for row in skew.ranks if row.rank == skew.straggler)
    return f"The others wait most for rank {skew.straggler}: {format_seconds(caused)} in the traced step."


def clocks_in_words(skew: Skew) -> str:
    """What comparing the ranks' times rests on, where it is not simply one machine's clock; else ""."""
    if any(clock.contradicted for clock in skew.clocks):
        return "The ranks' clocks contradict each other: what compares their times is not to be relied on."
    if any(clock.source == "wall clocks" for clock in skew.clocks):
        return "The ranks' times are compared by their machines' wall clocks."
    estimated = [clock for clock in skew.clocks if clock.source == "collectives"]
    if not estimated:
        return ""
    uncertainty_s = max(clock.uncertainty_s or 0.0 for clock in estimated)
    apart_s = max(abs(clock.offset_s) for clock in estimated)
    return (
        f"The ranks' clocks are up to {format_seconds(apart_s)} apart; they are aligned by their collectives "
        f"to about {format_seconds(uncertainty_s)}."
    )


def _figure(skew: Skew) -> Figure:
    rows = skew.ranks[:MAX_RANKS]
    times, time_unit = _time_bars(rows)
    peaks, size_unit = _peak_marks(rows)
    return Figure(
        name="skew",
        title=TITLE,
        kinds=(MEASURED,),
        basis=_BASIS,
        label=verdict(skew),
        traces=[*times, peaks],
        layout={
            "xaxis": {
                "title": {"text": "rank"},
                "tickformat": "d",
                "anchor": "y2",
                "showgrid": False,
                "zeroline": False,
                **({"dtick": 1} if len(rows) <= 16 else {}),
            },
            "yaxis": {"title": {"text": time_unit}, "rangemode": "tozero", "domain": [0.36, 1]},
            "yaxis2": {"title": {"text": f"peak ({size_unit})"}, "rangemode": "tozero", "domain": [0, 0.26]},
            "barmode": "group",
            "hovermode": "closest",
        },
        height_px=430,
        note=f"{verdict(skew)} Spread, (max - min) / median: step time {format_fraction(skew.step_time_spread)}, "
        f"compute {format_fraction(skew.compute_spread)}, peak {format_fraction(skew.peak_spread)}."
        + (f" {clocks}" if (clocks := clocks_in_words(skew)) else ""),
    )


def _time_bars(rows: Sequence[RankTimes]) -> tuple[list[dict[str, object]], str]:
    """A group of bars a rank, and the unit that they are in."""
    series = (
        ("median step (timed)", "var(--forward)", "", [row.step_time_s for row in rows]),
        ("in operators (traced)", "var(--dim)", "", [row.compute_s for row in rows]),
        ("waits for others (traced)", "var(--wait)", "/", [row.waiting_s for row in rows]),
        ("others wait for it (traced)", "var(--exposed)", "x", [row.caused_waiting_s for row in rows]),
    )
    factor, unit = seconds_scale(value for _, _, _, values in series for value in values if value is not None)
    bars: list[dict[str, object]] = [
        {
            "type": "bar",
            "name": name,
            "x": [row.rank for row in rows],
            "y": [None if value is None else value / factor for value in values],
            "marker": {
                "color": color,
                "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "var(--card)"},
            },
            "hovertemplate": f"rank %{{x}}, {name}: %{{y:.4~g}} {unit}<extra></extra>",
        }
        for name, color, pattern, values in series
        if any(value is not None for value in values)
    ]
    return bars, unit


def _peak_marks(rows: Sequence[RankTimes]) -> tuple[dict[str, object], str]:
    """A mark a rank, and the unit that they are in."""
    factor, unit = bytes_scale(row.peak_allocated_bytes or 0 for row in rows)
    marks: dict[str, object] = {
        "type": "scatter",
        "mode": "markers",
        "name": "peak",
        "x": [row.rank for row in rows],
        "y": [
            None if row.peak_allocated_bytes is None else row.peak_allocated_bytes / factor for row in rows
        ],
        "yaxis": "y2",
        "marker": {"color": "var(--text)", "symbol": "diamond", "size": 9},
        "hovertemplate": f"rank %{{x}}, peak: %{{y:.4~g}} {unit}<extra></extra>",
    }
    return marks, unit


def _table(skew: Skew) -> Block:
    more = len(skew.ranks) - MAX_RANKS
    return table(
        "The same in figures",
        ("rank", "peak", "median step", "in operators", "waits for others", "others wait for it"),
        (_cells(row) for row in skew.ranks[:MAX_RANKS]),
        kinds=(MEASURED,),
        basis=_BASIS,
        note=f"{more} further ranks are left out." if more > 0 else "",
    )


def _cells(row: RankTimes) -> tuple[str, ...]:
    return (
        str(row.rank),
        format_bytes(row.peak_allocated_bytes),
        format_seconds(row.step_time_s),
        format_seconds(row.compute_s),
        format_seconds(row.waiting_s),
        format_seconds(row.caused_waiting_s),
    )
