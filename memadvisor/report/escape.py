"""How text from the user's program enters the page: as text, whatever it holds.

A module may be called `</script>`, `<b>`, `%{y}` or hold control characters. There are three places where
text can go, and one function for each (`prose` is `html_text` with fewer places to break lines); nothing else may put a string into the page.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from typing import Any

# Controls, invisible formatting (bidirectional overrides among it), lone surrogates, line separators.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Of a command line, with its value where that is short.
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]{0,40}(?![\w-])(?: \w{1,12}(?!\S))?")


def visible(text: str) -> str:
    """`text` with every character that would act instead of show written as an escape, like `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNPRINTABLE else char
        for char in text
    )


# In sentences no line ends between a figure and its unit.
_UNIT, _NO_BREAK = re.compile(r"(?<=\d) (?=%|[KMGT]?i?B\b|[mun]?s\b|[kMGTPE]\b|[kMGTPE]?FLOP)"), "\u00a0"


def html_text(text: str) -> str:
    """For the page itself, between tags and inside quoted attributes."""
    return html.escape(visible(text), quote=True)


def prose(text: str) -> str:
    """As `html_text`, for sentences: figures stay with their units."""
    return _UNIT.sub(_NO_BREAK, html_text(text))


def html_with_code(text: str) -> str:
    """As `prose`; what stands between backticks becomes code, to be copied as it is, whose options no line ends within."""
    pieces = html_text(text).split("`")
    if len(pieces) % 2 == 0:  # an odd backtick, from a name perhaps: leave all of them as they are
        return _UNIT.sub(_NO_BREAK, "`".join(pieces))
    return "".join(
        f"<code>{_with_options(piece)}</code>" if i % 2 else _UNIT.sub(_NO_BREAK, piece)
        for i, piece in enumerate(pieces)
    )


def _with_options(code: str) -> str:
    return _OPTION.sub(r'<span class="option">\g<0></span>', code)


def plotly_text(text: str) -> str:
    """For a figure's labels and hover texts, which Plotly reads as a little HTML."""
    return html.escape(visible(text), quote=False)


def script_json(value: Any) -> str:
    """JSON that stands in a script element: no character of it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shortened(name: str, length: int = 28) -> str:
    """The end of a dotted name, where modules differ; not yet escaped."""
    name = visible(name)
    return name if len(name) <= length else "…" + name[len(name) - length + 1 :]
