"""The plan's lanes: what each was predicted to do when, above what this run measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.comparison import Compared
from memadvisor.analyzers.planned_lanes import LaneRow, PlannedLanes, planned_lanes
from memadvisor.cost.timeline import kind_word
from memadvisor.plan import LaneInterval
from memadvisor.report.blocks import MEASURED, PREDICTED, Block, Figure, Missing
from memadvisor.report.escape import shortened
from memadvisor.report.lanes import bars
from memadvisor.report.words import color_of, seconds_scale
from memadvisor.units import format_fraction, format_seconds

TITLE = "The step's lanes, predicted and measured"
LANE_NAMES = {"compute": "compute", "collective": "collectives", "host": "to and from host", "disk": "disk"}
# The first words of what lanes do, and the name and the color that they are drawn under.
KINDS = {
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "recomputation": ("recomputation", "recompute"),
    **dict.fromkeys(("optimizer", "update"), ("optimizer", "optimizer")),
    **dict.fromkeys(("work", "evaluation"), ("outside", "outside")),
    "engine": ("the engine's own work", "dim"),
    **dict.fromkeys(("gather", "all_gather", "broadcast"), ("gather", "parameter")),
    **dict.fromkeys(("reduce", "all_reduce", "reduce_scatter", "average"), ("reduce", "gradient")),
    **dict.fromkeys(("send", "recv"), ("send and receive", "communication")),
    **dict.fromkeys(("prefetch", "offload"), ("transfer", "optimizer-state")),
}
_OTHERS = {"compute": ("other work", "dim"), "collective": ("other messages", "communication")}
_TRANSFER = ("transfer", "optimizer-state")
_HEIGHT = 0.8
_GAP = 0.45  # between lanes, in rows


def lanes_figure(analysis: Analysis) -> list[Block]:
    """The figure, or why there is none; nothing for what predicts nothing."""
    found, plan = planned_lanes(analysis), analysis.run.plan
    if found is not None:
        is_one = found.rank is not None and len(analysis.ranks) > 1
        return [_figure(found, f"slowest rank, {found.rank}" if is_one else "")]
    if plan is None or plan.prediction is None:
        return []
    why = why_none(analysis)
    return [Missing(name="planned-lanes", title=TITLE, why=why, absence="Nothing to lay side by side.")]


def why_none(analysis: Analysis) -> str:
    """In a sentence, where a plan predicts and its lanes cannot stand beside what was measured."""
    plan = analysis.run.plan
    if plan is not None and plan.ranks:
        return "The plan has choices by rank, and its prediction is of their peaks and of the whole step."
    if plan is not None and plan.timeline is None:
        return "The plan is of a version that did not keep its lanes; one that is made anew has them."
    return "No timed step was finished."


def kind_of(each: LaneInterval) -> tuple[str, str]:
    """The name and the color that it is drawn under."""
    if each.lane in ("host", "disk"):
        return _TRANSFER
    return KINDS.get(kind_word(each.label), _OTHERS[each.lane])


def errors_in_words(found: PlannedLanes) -> str:
    """`Step: predicted 1.96 s, measured 2.07 s (5.1 % too short). Exposed communication: ...`."""
    exposed = found.exposed_communication_s
    of_exposed = "" if exposed.predicted is None else f" Exposed communication: {_off(exposed)}."
    return f"Step: {_off(found.step_time_s)}.{of_exposed}"


def _off(pair: Compared) -> str:
    words = f"predicted {format_seconds(pair.predicted)}, measured {format_seconds(pair.measured)}"
    error = pair.error_fraction
    if error is None:
        return words
    if not round(error, 3):
        return f"{words} (as predicted)"
    return f"{words} ({format_fraction(abs(error))} too {'long' if error > 0 else 'short'})"


def remarks_in_words(found: PlannedLanes) -> Iterator[str]:
    """What of it is not to be read as if it were of one clock."""
    if any("traced" in row.basis for row in found.rows):
        yield (
            "Collectives, and transfers to and from a disk, are seen in the traced step alone, which tracing makes longer: read "
            "them by its compute. Exposed communication is measured as its share of that step."
        )
    if found.rank is None:
        yield (
            "Predicted passes count from the pipeline's first one; a measured row begins with its own rank's step, and its "
            "passes are named by their order. In gaps a rank waits for others, or does what is no pass. The step is "
            "predicted as the median one with what the plan adds, and need not end where the played passes do."
        )
        return
    yield "Where compute waits, predicted lanes have a gap; what was measured has the wait inside the unit that waited."
    if found.unlearnt_s is not None:
        yield (
            f"Predicted lanes end at {format_seconds(found.unlearnt_s)}: what earlier runs have taught of the step's time is "
            "in the step's prediction, and in no lane."
        )
    for row in found.rows:
        if row.intervals is None:
            yield f"{LANE_NAMES[row.lane].capitalize()}: not measured, as {row.why}."


def _figure(found: PlannedLanes, basis: str) -> Figure:
    factor, unit = seconds_scale([found.longest_s])
    places = list(_places(found.rows))
    drawn = [(row, place) for row, place in zip(found.rows, places, strict=True)]
    kinds = dict.fromkeys(kind_of(each) for row in found.rows for each in row.intervals or ())
    errors = errors_in_words(found)
    return Figure(
        name="planned-lanes",
        title=TITLE,
        kinds=(PREDICTED, MEASURED),
        basis=basis,
        label=errors,
        traces=[_bars(row, place, factor) for row, place in drawn if row.intervals],
        layout={
            "xaxis": {
                "title": {"text": f"time from the step's start ({unit})"},
                "range": [0, 1.01 * found.longest_s / factor],
                "zeroline": False,
            },
            "yaxis": {
                "tickvals": places,
                "ticktext": [_name(row) for row in found.rows],
                "range": [places[-1] + 0.6, -0.6],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "barmode": "overlay",
            "hovermode": "closest",
            "showlegend": False,
            "uniformtext": {"minsize": 9, "mode": "hide"},
            "shapes": [_end(row, place, factor) for row, place in drawn if row.intervals is not None],
            "annotations": [_not_measured(place) for row, place in drawn if row.intervals is None],
        },
        height_px=round(110 + 46 * places[-1] + 46),
        note=f"{errors} Hatched is predicted, solid measured; a line ends each step. {' '.join(remarks_in_words(found))}",
        legend=[(name, f"var(--{color})") for name, color in kinds],
    )


def _places(rows: Sequence[LaneRow]) -> Iterator[float]:
    """A place for each row, lanes apart from each other."""
    place = 0.0
    for number, (_, members) in enumerate(groupby(rows, key=lambda row: (row.rank, row.lane))):
        place += _GAP if number else 0.0
        for _ in members:
            yield place
            place += 1


def lane_name(row: LaneRow) -> str:
    """The lane; of a pipeline the rank."""
    return LANE_NAMES[row.lane] if row.rank is None else f"rank {row.rank}"


def _name(row: LaneRow) -> str:
    step = f": {format_seconds(row.step_s)}" if row.step_s and row.lane == "compute" else ""
    return f"{lane_name(row)}<br>{row.basis.removeprefix('measured, ')}{step}"


def _bars(row: LaneRow, place: float, factor: float) -> dict[str, Any]:
    intervals = row.intervals or ()
    colors = [f"var(--{kind_of(each)[1]})" for each in intervals]
    trace = bars(
        [(each.start_s, each.end_s) for each in intervals],
        rows=[place] * len(intervals),
        heights=[_HEIGHT] * len(intervals),
        factor=factor,
        colors=colors,
        texts=[_text(each) for each in intervals] if row.lane == "compute" and not row.is_predicted else (),
        hovers=[f"{row.basis}: {each.label}, {_when(each)}" for each in intervals],
        more={"name": row.basis, "showlegend": False},
    )
    if row.is_predicted:
        trace["marker"] = {
            "color": "var(--card)",
            "line": {"width": 1, "color": colors},
            "pattern": {"shape": "/", "size": 5, "fgcolor": colors, "bgcolor": "var(--card)"},
        }
    return trace


def _text(each: LaneInterval) -> str:
    what = each.label.partition(" of ")[2].removeprefix("micro-batch ")
    return shortened(what or each.label, 18)


def _when(each: LaneInterval) -> str:
    return f"{format_seconds(each.end_s - each.start_s)} from {format_seconds(each.start_s)} on"


def _end(row: LaneRow, place: float, factor: float) -> dict[str, Any]:
    x = row.step_s / factor
    line = {"width": 2, "color": color_of("text"), "dash": "dot" if row.is_predicted else "solid"}
    return {"type": "line", "x0": x, "x1": x, "y0": place - 0.5, "y1": place + 0.5, "line": line}


def _not_measured(place: float) -> dict[str, Any]:
    return {
        "text": "not measured",
        "x": 0.01,
        "xref": "paper",
        "y": place,
        "xanchor": "left",
        "showarrow": False,
        "font": {"color": "var(--dim)"},
    }
