"""Pictures made of block characters: bars, sparklines, and a stacked area whose cells are eighths high.

Pure functions from figures to rich Segments and Text; no widget and no run is known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.segment import Segment
from rich.style import Style
from rich.text import Text

_LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LOWER_EIGHTHS = " ▁▂▃▄▅▆▇█"

# From the bottom of every picture to its top; the order of a training step's memory.
CATEGORY_COLORS: dict[str, str] = {
    "parameter": "#4c8dff",
    "optimizer_state": "#8f6bff",
    "gradient": "#ff8c42",
    "activation": "#2ec4a6",
    "input": "#b8c94a",
    "temporary": "#f2c14e",
    "communication": "#e0569f",
    "weight_copy": "#7fb2e5",
    "other": "#9aa4b2",
    "unexplained": "#e5484d",
}

PHASE_COLORS: dict[str, str] = {
    "forward": "#2ec4a6",
    "recompute": "#f2c14e",
    "backward": "#ff8c42",
    "optimizer": "#8f6bff",
    "outside": "#5b6675",
    "baseline": "#5b6675",
}


def bar(value: float, largest: float, width: int) -> str:
    """A horizontal bar of `value / largest` of `width` cells; more than nothing shows at least a sliver."""
    if largest <= 0 or value <= 0 or width <= 0:
        return ""
    eighths = max(1, round(8 * width * min(1.0, value / largest)))
    full, rest = divmod(eighths, 8)
    return "█" * full + (_LEFT_EIGHTHS[rest] if rest else "")


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as columns between 0 and their largest."""
    shown = values[-width:] if width > 0 else []
    largest = max(shown, default=0.0)
    if largest <= 0:
        return " " * len(shown)
    return "".join(_LOWER_EIGHTHS[max(1, round(8 * max(0.0, value) / largest))] for value in shown)


def stacked_bar(parts: Sequence[tuple[float, str]], width: int) -> Text:
    """One bar of `width` cells divided as `parts`, (value, color), divide their sum."""
    total = sum(value for value, _ in parts)
    text = Text(no_wrap=True)
    if total <= 0 or width <= 0:
        return text
    reached, drawn = 0.0, 0
    for value, color in parts:
        reached += value
        end = round(width * reached / total)
        text.append("█" * (end - drawn), color)
        drawn = max(drawn, end)
    return text


def stacked_area(
    columns: Sequence[Mapping[str, float]], height: int, top: float, *, cursor: int | None = None
) -> list[list[Segment]]:
    """Rows of segments, top row first: each column stacks its categories from the bottom, up to `top`.

    A cell shows at most two colors: the lower one as a block of eighths, the other behind it. The
    cursor is a line through its column.
    """
    cells = [
        _column_cells(column, height, top, is_cursor=position == cursor)
        for position, column in enumerate(columns)
    ]
    return [_joined([column[row] for column in cells]) for row in reversed(range(height))]


def _column_cells(
    column: Mapping[str, float], height: int, top: float, *, is_cursor: bool
) -> list[tuple[str, Style]]:
    """A column's cells from the bottom to the top."""
    edges: list[tuple[float, str]] = []  # upper edge in eighths, color
    reached = 0.0
    for name, color in CATEGORY_COLORS.items():
        value = column.get(name, 0)
        if value > 0 and top > 0:
            reached += value
            edges.append((min(8.0 * height, 8.0 * height * reached / top), color))
    cells = [_cell(edges, 8.0 * row) for row in range(height)]
    return [_with_cursor(style) for _, style in cells] if is_cursor else cells


def _cell(edges: Sequence[tuple[float, str]], bottom: float) -> tuple[str, Style]:
    """The two colors that fill most of the cell from `bottom` to `bottom + 8` eighths."""
    shares: list[tuple[float, str | None]] = []
    reached = bottom
    for edge, color in edges:
        if edge > reached:
            shares.append((min(edge, bottom + 8) - reached, color))
            reached = min(edge, bottom + 8)
    if reached < bottom + 8:
        shares.append((bottom + 8 - reached, None))
    largest = sorted(sorted(range(len(shares)), key=lambda i: -shares[i][0])[:2])
    lower, lower_color = shares[largest[0]]
    upper, upper_color = shares[largest[-1]]
    eighths = 8 if len(largest) == 1 else round(8 * lower / (lower + upper))
    if eighths in (0, 8):
        whole = upper_color if eighths == 0 else lower_color
        return ("█", Style(color=whole)) if whole is not None else (" ", Style())
    return _LOWER_EIGHTHS[eighths], Style(color=lower_color, bgcolor=upper_color)


def _with_cursor(style: Style) -> tuple[str, Style]:
    return "│", Style(color="#ffffff", bgcolor=style.color, bold=True)


def _joined(cells: Sequence[tuple[str, Style]]) -> list[Segment]:
    """Neighbours of one style as one segment."""
    segments: list[Segment] = []
    text, style = "", Style()
    for character, following in cells:
        if text and following != style:
            segments.append(Segment(text, style))
            text = ""
        text, style = text + character, following
    if text:
        segments.append(Segment(text, style))
    return segments
