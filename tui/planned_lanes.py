"""The plan's lanes in the terminal: a line a clock, predicted in shaded blocks, measured in full ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from memadvisor.analyzers.planned_lanes import LaneRow, PlannedLanes
from memadvisor.plan import LaneInterval
from memadvisor.report.planned_lanes import errors_in_words, kind_of, lane_name, remarks_in_words
from memadvisor.tui.drawing import CATEGORY_COLORS, PHASE_COLORS
from memadvisor.tui.text import flow, paragraph
from memadvisor.units import format_seconds

_COLORS = {**PHASE_COLORS, **{name.replace("_", "-"): color for name, color in CATEGORY_COLORS.items()}}
_DIM = PHASE_COLORS["outside"]
_SHADED, _FULL = "▒", "█"


def lane_lines(found: PlannedLanes, width: int) -> list[Text]:
    """How far off the prediction is, the lanes on one axis of time, what their colors mean, and how to read them."""
    heads = [_head(row) for row in found.rows]
    longest = max(len(head) for head in heads)
    num_cells = max(10, width - longest - 1)
    return [
        Text(""),
        paragraph(("Lanes ", "bold"), f"of {_whose(found)}. {errors_in_words(found)}"),
        *(
            Text.assemble(f"{head:<{longest}} ", _drawn(row, num_cells, found.longest_s), no_wrap=True)
            for head, row in zip(heads, found.rows, strict=True)
        ),
        *flow([*_legend(found.rows), paragraph((f"{_SHADED} predicted, {_FULL} measured", "dim"))], width),
        paragraph((" ".join(remarks_in_words(found)), "dim")),
    ]


def _whose(found: PlannedLanes) -> str:
    return "every rank" if found.rank is None else f"rank {found.rank}"


def _head(row: LaneRow) -> str:
    step = f": {format_seconds(row.step_s)}" if row.step_s and row.lane == "compute" else ""
    return f"{lane_name(row)}, {row.basis.removeprefix('measured, ')}{step}"


def _drawn(row: LaneRow, num_cells: int, longest_s: float) -> Text:
    if row.intervals is None:
        return Text("not measured", "dim")
    cells = _cells(row.intervals, num_cells, longest_s)
    text = Text(no_wrap=True)
    for color in cells:
        block = _SHADED if row.is_predicted else _FULL
        text.append(" " if color is None else block, color or "")
    return text


def _cells(intervals: Sequence[LaneInterval], num_cells: int, longest_s: float) -> list[str | None]:
    """The color of what fills most of each cell; what is shorter than one shows where nothing else does."""
    share: list[dict[str, float]] = [{} for _ in range(num_cells)]
    cell_s = longest_s / num_cells
    for each in intervals if cell_s else ():
        color = _color(each)
        first = min(num_cells - 1, int(each.start_s / cell_s))
        last = min(num_cells - 1, int(each.end_s / cell_s))
        for cell in range(first, last + 1):
            inside_s = min(each.end_s, (cell + 1) * cell_s) - max(each.start_s, cell * cell_s)
            share[cell][color] = share[cell].get(color, 0.0) + inside_s
    return [max(colors, key=lambda color: colors[color]) if colors else None for colors in share]


def _color(each: LaneInterval) -> str:
    return _COLORS.get(kind_of(each)[1], _DIM)


def _legend(rows: Sequence[LaneRow]) -> Iterator[Text]:
    named = {kind_of(each)[0]: _color(each) for row in rows for each in row.intervals or ()}
    for name, color in named.items():
        yield paragraph((_FULL, color), f" {name}")
