"""Tables of layouts, one line each, as `estimate` and `advise` show what a search found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from memadvisor.units import format_bytes

_FRONT_ROWS = 8

Found = TypeVar("Found")


def some_of(front: tuple[Found, ...]) -> tuple[Found, ...]:
    """Of a front of two and more: both ends, and rows between them; JSON has them all."""
    rows = min(_FRONT_ROWS, len(front))
    return tuple(front[row * (len(front) - 1) // (rows - 1)] for row in range(rows))


def layouts_table(
    title: str, time_heading: str, rows: Iterable[tuple[str, str, float, float, float]]
) -> Table:
    """`rows`: the layout, its step time as the heading has it, MFU, peak in bytes, and the chance of running out of memory."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("layout", time_heading, "MFU", "peak", "p(OOM)"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for words, step_time, mfu, peak_bytes, p_oom in rows:
        table.add_row(Text(words), step_time, f"{mfu:.1%}", format_bytes(round(peak_bytes)), f"{p_oom:.1%}")
    return table
