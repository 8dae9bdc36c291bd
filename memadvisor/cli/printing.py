"""How a command's sections reach stdout: a terminal, a file or a pipe."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

PLAIN_WIDTH = 110  # of text that goes to a file or a pipe
LEAST_WIDTH = 60
_LABEL_WIDTH = 13
_NEAREST = "memadvisor-nearest"
_BLOCKS = "\u2588\u2589\u258a\u258b\u258c\u258d\u258e\u258f\u25a0"  # of which bars and legends are made

# A number stays with its unit: rich breaks lines at no-break spaces too.
_BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=%|(?:[KMGT]i)?B\b|[num]?s\b|[kMGT]\b|\w+/s\b)|(?<=\d [kMGT]) (?=\w+/s\b)"
)
_GLUE = "\ue000"

# Sections that are one line still stand apart; notes and problems stay together.
_TITLES_OF_LINES = ("Peak", "Model", "Step", "Utilization", "Units", "Communication", "What differs")


class _Pages(Console):
    """A console that breaks no line of words between a number and its unit."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(Sentence(each) if isinstance(each, Text) else each for each in objects), **options)


def stdout_console() -> Console:
    """The terminal as wide as it is, but for narrow ones, which break lines themselves: tables would be cut to nothing. A
    file or pipe gets plain text of a fixed width."""
    if hasattr(sys.stdout, "reconfigure"):
        codecs.register_error(_NEAREST, _nearest)
        sys.stdout.reconfigure(errors=_NEAREST)
    if not sys.stdout.isatty():
        return _Pages(width=PLAIN_WIDTH, force_terminal=False)
    return _Pages(width=max(Console().width, LEAST_WIDTH))


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Of characters that the terminal's encoding lacks: bars of #, else a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join("#" if char in _BLOCKS else "?" for char in lacking), error.end


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words on as many lines as they take, figures with their units."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.no_wrap or self.text.no_wrap:
            yield self.text
        else:
            yield from _lines(self.text, console, options.max_width)


def _lines(text: Text, console: Console, width: int) -> Iterator[Text]:
    text = text.copy()
    text.plain = _BEFORE_UNIT.sub(_GLUE, text.plain)
    for line in text.wrap(console, width) if width > 0 else [text]:
        line.plain = line.plain.replace(_GLUE, " ")
        line.rstrip()
        yield line


@dataclass(frozen=True, slots=True)
class Labelled:
    """A word in bold, and beside it text whose further lines stand beneath its first."""

    label: str
    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - _LABEL_WIDTH
        for number, line in enumerate(_lines(self.text, console, width)):
            head = "" if number else self.label
            yield Text.assemble((f"{head:<{_LABEL_WIDTH}}", "bold"), line)


def print_sections(sections: Iterable[RenderableType], console: Console) -> None:
    """Each with an empty line after it; lines of words follow each other."""
    for section in sections:
        print_plainly(section, console)
        if not isinstance(section, Text) or section.plain.startswith(_TITLES_OF_LINES):
            print_plainly(Text(""), console)


def print_plainly(what: RenderableType, console: Console) -> None:
    """Nothing in it is read as markup, an emoji or code."""
    console.print(what, markup=False, highlight=False, emoji=False)


def print_json(value: Any) -> None:
    """One object, nothing else."""
    print(json.dumps(value, indent=1, allow_nan=False))
