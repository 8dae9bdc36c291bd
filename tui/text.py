"""How words that came from the user's program reach the terminal: plain, whatever they hold.

A module may be called `layers[/0]`, `[red]x` or "\\x1b[31m". Everything here returns rich Text, which
never reads markup; a str handed to a widget may be read as markup, so views hand over none.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from rich.text import Text

# Controls, invisible formatting (bidirectional overrides among it), lone surrogates, line separators.
_LONGEST_OPERATOR = 30  # characters
_SHORTEST_NAME, _LONGEST_NAME = 26, 60
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def plain(text: str) -> str:
    """`text` on one line, with every character gone that a terminal would act on instead of show."""
    if text.isascii() and text.isprintable():
        return text
    spaced = text.replace("\n", " ").replace("\t", " ")
    return "".join(char for char in spaced if unicodedata.category(char) not in _UNPRINTABLE)


def words(text: str, style: str = "") -> Text:
    """One piece of text, shown as it stands."""
    return Text(plain(text), style=style, no_wrap=True, overflow="ellipsis")


def operator(name: str) -> Text:
    """As the other views name it, without torch's namespace; a long one by its end, which tells it from others: columns
    after it must be on the screen."""
    return words(_by_its_end(name.removeprefix("aten::"), _LONGEST_OPERATOR))


def module(name: str, width: int, beside: int, before: str = "") -> Text:
    """In a table of `width` columns with `beside` of them for others; a long one by its end, which tells it from others."""
    room = max(_SHORTEST_NAME, min(_LONGEST_NAME, width - beside)) - len(before)
    return words(before + _by_its_end(name or "(model)", max(_SHORTEST_NAME // 2, room)))


def _by_its_end(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def number(text: str, style: str = "") -> Text:
    """A figure for a table's column: aligned right."""
    return Text(plain(text), style=style, justify="right", no_wrap=True)


def paragraph(*pieces: str | tuple[str, str]) -> Text:
    """Pieces, each a text or a (text, style), joined into one line that wraps."""
    joined = Text()
    for piece in pieces:
        text, style = (piece, "") if isinstance(piece, str) else piece
        joined.append(plain(text), style)
    return joined


def lines(rows: Iterable[Text]) -> Text:
    """Rows, one below the other."""
    return Text("\n").join(rows)


def flow(items: Sequence[Text], width: int) -> list[Text]:
    """Items side by side, two spaces apart, in as many rows as they need; no item is broken."""
    rows: list[Text] = []
    for item in items:
        if rows and rows[-1].cell_len + 2 + item.cell_len <= width:
            rows[-1].append("  ").append_text(item)
        else:
            rows.append(item.copy())
    return rows


def legend(parts: Iterable[tuple[str, str, str]]) -> list[Text]:
    """Items for `flow`: a square of the color, the name, the figure."""
    return [paragraph(("■ ", color), f"{name.replace('_', ' ')} {figure}") for name, color, figure in parts]
