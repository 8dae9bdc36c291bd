"""Whose bytes filled the peaks of two runs: by category, beside what a plan predicted, and by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memadvisor.analyzers.comparison import Comparison
from memadvisor.analyzers.peak_difference import PeakUnitChange
from memadvisor.category_words import category_name
from memadvisor.report.blocks import INNER, MEASURED, PREDICTED, Block, Figure, Missing, table
from memadvisor.report.difference_memory import highest_bytes
from memadvisor.report.difference_view import PairView
from memadvisor.report.difference_words import NOT_RECORDED, texts
from memadvisor.report.escape import plotly_text, shortened
from memadvisor.report.words import STACK, bytes_scale, color_of, place_name, unit_name
from memadvisor.run.records import UNEXPLAINED
from memadvisor.units import counted, format_bytes

MAX_UNITS = 24  # drawn; the table has more
MAX_ROWS = 100
_NO_MODULE = "(no module)"


def peak_bars(view: PairView) -> Block:
    """The peaks as bars, divided among the categories: before, predicted where a plan did, after."""
    title = "The peak, by category"
    bars = [(name, peak) for name, side in view.sides if (peak := side.result.peak) is not None]
    if len(bars) < 2:
        return Missing(name="both-peaks", title=title, why=view.why_untraced)
    sizes = [
        (
            f"{name}<br>{format_bytes(peak.allocated_bytes)}",
            {**peak.by_category_bytes, UNEXPLAINED: peak.unexplained_bytes},
        )
        for name, peak in bars
    ]
    predicted = _predicted(view.planned)
    if predicted is not None and view.planned is not None:
        label = f"predicted<br>{format_bytes(view.planned.peak_bytes.predicted)}"
        sizes.insert(1, (label, {name: round(size) for name, size in predicted.items()}))
    factor, unit = bytes_scale([highest_bytes(view)])
    return Figure(
        name="both-peaks",
        title=title,
        kinds=(MEASURED,) if predicted is None else (MEASURED, PREDICTED),
        basis=view.traced_basis,
        label=", ".join(name.replace("<br>", " ") for name, _ in sizes),
        traces=[
            _category_bars(category, row, parts, is_predicted=row == 1 < len(sizes) - 1, factor=factor)
            for row, (_, parts) in enumerate(sizes)
            for category in STACK
            if parts.get(category)
        ],
        layout={
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "yaxis": _rows_axis([name for name, _ in sizes]),
            "barmode": "relative",
            "bargap": 0.3,
            "hovermode": "closest",
            "showlegend": False,
        },
        height_px=80 + 56 * len(sizes),
        legend=[(category_name(c), color_of(c)) for c in STACK if any(parts.get(c) for _, parts in sizes)],
        note="The two peaks are moments of their own: " + _places(view),
    )


def _places(view: PairView) -> str:
    before, after = (None if place is None else place_name(place) for place in view.rank.peak_position)
    return f"before in {before}, after in {'the same place' if before == after else after}."


def _predicted(planned: Comparison | None) -> Mapping[str, float] | None:
    if planned is None:
        return None
    sizes = {
        name: pair.predicted for name, pair in planned.by_category_bytes.items() if pair.predicted is not None
    }
    return sizes or None


def _rows_axis(names: Sequence[str]) -> dict[str, Any]:
    return {
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }


def _category_bars(
    category: str, row: int, parts: Mapping[str, float], *, is_predicted: bool, factor: float
) -> dict[str, Any]:
    color = color_of(category)
    marker: dict[str, Any] = {"color": color, "line": {"width": 1, "color": "var(--card)"}}
    if is_predicted:
        pattern = {"shape": "/", "size": 5, "fgcolor": color, "bgcolor": "var(--card)"}
        marker = {"color": "var(--card)", "line": {"width": 1, "color": color}, "pattern": pattern}
    return {
        "type": "bar",
        "orientation": "h",
        "name": category_name(category),
        "x": [parts[category] / factor],
        "y": [row],
        "marker": marker,
        "hovertext": [f"{category_name(category)}: {format_bytes(parts[category])}"],
        "hoverinfo": "text",
    }


def peak_table(view: PairView) -> Block:
    """The same in figures, and what an allocator reserved."""
    rank, planned = view.rank, view.planned
    known = None if planned is None else planned.by_category_bytes
    rows = [
        (("peak", None if planned is None else planned.peak_bytes.predicted), rank.peak_bytes),
        *(
            (
                (
                    f"{INNER}{category_name(name)}",
                    None if known is None or name not in known else known[name].predicted,
                ),
                change,
            )
            for name in STACK
            if (change := rank.by_category_bytes[name]).before or change.after or name == UNEXPLAINED
        ),
    ]
    if (rank.known_peak_bytes.before, rank.known_peak_bytes.after) != (
        rank.peak_bytes.before,
        rank.peak_bytes.after,
    ):
        rows.append((("highest of all steps", None), rank.known_peak_bytes))
    if rank.reserved_bytes.before is not None or rank.reserved_bytes.after is not None:
        rows.append(
            (("reserved", None if planned is None else planned.reserved_bytes.predicted), rank.reserved_bytes)
        )
    lines = []
    for (name, predicted), change in rows:
        before, after, difference, share = texts(change, format_bytes)
        promise = () if planned is None else ("-" if predicted is None else format_bytes(predicted),)
        lines.append((name, before, *promise, after, difference, share))
    return table(
        "The peak in figures",
        ("", "before", *(() if planned is None else ("predicted",)), "after", "difference", ""),
        lines,
        kinds=(MEASURED,) if planned is None else (MEASURED, PREDICTED),
        basis=view.traced_basis,
        note=""
        if planned is None
        else "Predicted by the plan of the run after; before and after are measured.",
    )


def peak_by_unit(view: PairView) -> Block:
    """Two bars for each unit that holds more or less at its run's peak, by category."""
    title = "At the peak, by unit"
    rows = view.rank.peak_units
    if rows is None:
        return Missing(name="both-units", title=title, why=view.why_untraced)
    differing = [row for row in rows if row.size_bytes.difference]
    if not differing:
        return Missing(
            name="both-units",
            title=title,
            why="Every unit holds as much as before.",
            absence="No difference.",
        )
    shown = differing[:MAX_UNITS]
    factor, unit = bytes_scale(
        size for row in shown for size in (row.size_bytes.before, row.size_bytes.after) if size is not None
    )
    more = len(differing) - len(shown)
    return Figure(
        name="both-units",
        title=title,
        kinds=(MEASURED,),
        basis=view.traced_basis,
        label=f"Two bars for each of {counted(len(shown), 'unit')}: before and after.",
        traces=list(_unit_bars(shown, factor)),
        layout={
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "yaxis": {
                **_rows_axis([name for row in shown for name in (f"{_label(row)} · before", "after")]),
                "tickvals": [place for number in range(len(shown)) for place in (number - 0.2, number + 0.2)],
                "range": [len(shown) - 0.5, -0.5],
            },
            "barmode": "stack",
            "hovermode": "closest",
            "showlegend": False,
        },
        height_px=90 + 46 * len(shown),
        legend=[
            (category_name(c), color_of(c)) for c in STACK if any(c in row.by_category_bytes for row in shown)
        ],
        note="Those that differ most, the largest difference first."
        + (
            f" {counted(more, 'unit')} that {'differs' if more == 1 else 'differ'} less left out."
            if more
            else ""
        ),
    )


def _label(row: PeakUnitChange) -> str:
    return plotly_text(shortened(_unit_text(row), 24))


def _unit_text(row: PeakUnitChange) -> str:
    return _NO_MODULE if row.unit is None else unit_name(row.unit)


def _unit_bars(rows: Sequence[PeakUnitChange], factor: float) -> Iterator[dict[str, Any]]:
    for category in STACK:
        holding = [(place, row) for place, row in enumerate(rows) if category in row.by_category_bytes]
        if not holding:
            continue
        sides = [
            (place + offset, row, side, getattr(row.by_category_bytes[category], side))
            for place, row in holding
            for side, offset in (("before", -0.2), ("after", 0.2))
        ]
        yield {
            "type": "bar",
            "orientation": "h",
            "name": category_name(category),
            "x": [size / factor for *_, size in sides],
            "y": [place for place, *_ in sides],
            "width": [0.34] * len(sides),
            "marker": {"color": color_of(category), "line": {"width": 0.5, "color": "var(--card)"}},
            "hovertext": [
                f"{_label(row)}, {side}: {category_name(category)} {format_bytes(size)}"
                for _, row, side, size in sides
            ],
            "hoverinfo": "text",
        }


def peak_unit_table(view: PairView) -> Block | None:
    rows = [row for row in view.rank.peak_units or () if row.size_bytes.difference]
    if not rows:
        return None
    more = len(rows) - MAX_ROWS
    return table(
        "At the peak, by unit, in figures",
        ("unit", "what differs most", "before", "after", "difference", ""),
        ((_unit_text(row), _most(row), *texts(row.size_bytes, format_bytes)) for row in rows[:MAX_ROWS]),
        kinds=(MEASURED,),
        basis=view.traced_basis,
        num_text=2,
        note=f"{more} more are left out." if more > 0 else "",
    )


def _most(row: PeakUnitChange) -> str:
    name = max(
        row.by_category_bytes, key=lambda each: abs(row.by_category_bytes[each].difference or 0), default=""
    )
    return category_name(name) or NOT_RECORDED
