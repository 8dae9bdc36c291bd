"""Headings, tables and names as all sections of `memadvisor show` print them."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from memadvisor.cli.visible import visible
from memadvisor.tui.text import paragraph, plain

NOT_RECORDED = "not recorded"


def heading(title: str, *rest: str | tuple[str, str]) -> Text:
    return paragraph((title, "bold"), *((("  "), *rest) if rest else ()))


def printable(text: str) -> Text:
    """Words that may hold names of the user's program: no markup, and control characters as escapes, not left out."""
    return Text(visible(text))


def name_of(unit: str) -> str:
    """The root module has no name of its own."""
    return unit or "(model)"


def shorten_left(name: str, width: int) -> str:
    """The end of a dotted name, where modules differ."""
    name = plain(name)
    return name if len(name) <= width else "..." + name[len(name) - width + 3 :]


def grid(num_columns: int) -> Table:
    """Columns without a head, indented; the last one gives way where they are too wide together."""
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 1, 0, 1))
    for position in range(num_columns):
        table.add_column(no_wrap=position < num_columns - 1, overflow="ellipsis")
    return table


def table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 1, 0, 1), header_style="dim")
    for position, head in enumerate(heads):
        is_text = position == 0 or head == "dtype"
        table.add_column(head, no_wrap=True, overflow="ellipsis", justify="left" if is_text else "right")
    return table
