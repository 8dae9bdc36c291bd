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
    name = name.removeprefix("aten::")
    return words(name if len(name) <= _LONGEST_OPERATOR else f"...{name[3 - _LONGEST_OPERATOR :]}")


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
