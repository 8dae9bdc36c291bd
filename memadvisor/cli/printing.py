"""How a command's sections reach stdout: a terminal, a file or a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

PLAIN_WIDTH = 110  # of text that goes to a file or a pipe

# Sections that are one line still stand apart; notes and problems stay together.
_TITLES_OF_LINES = ("Peak", "Model", "Step", "Utilization", "Units", "Communication", "What differs")


def stdout_console() -> Console:
    """The terminal as wide as it is; a file or pipe gets plain text of a fixed width."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show a character gets a question mark
        sys.stdout.reconfigure(errors="replace")
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, force_terminal=False)


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
