"""The help screen: every key, and what the words mean."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from memadvisor.tui.text import lines, paragraph

_TEXT_WIDTH = 54
_KEYS = (
    ("1 ... 8", "the tabs, from Overview to Notes"),
    ("[  ]", "previous and next rank"),
    ("tab  arrows", "move between the tabs, the tables and their rows"),
    ("?  q", "this help; quit"),
    ("", ""),
    ("Memory", "left, right: the cursor (shift: ten columns); p: to the peak; + -: zoom; 0: the whole step"),
    ("Modules", "enter: fold and unfold; s: sort; /: search; escape: end the search"),
    ("Activations", "s: sort by bytes, module, birth or time kept; /: search"),
    ("", ""),
)
_WORDS = (
    ("peak", "the most bytes that the allocator had handed out at one moment"),
    ("unexplained", "what the allocator reports and no recorded storage explains"),
    ("saved", "kept by autograd for the backward; a storage counts once"),
    ("timed step", "recorded cheaply: the only ones that times and rates are made of"),
    ("traced step", "recorded completely, and slower: what memory and FLOPs are read from"),
    ("exposed", "communication during which no operator ran"),
    ("MFU, HFU", "needed and executed FLOPs, as a share of what the device could do"),
)


class HelpScreen(ModalScreen[None]):
    """Closed by the key that opened it, Escape or q."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "Close", key_display="esc")
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(
                lines(
                    [
                        paragraph(("Keys", "bold")),
                        *(_entry(name, text) for name, text in _KEYS),
                        paragraph(("Words", "bold")),
                        *(_entry(name, text) for name, text in _WORDS),
                    ]
                ),
                markup=False,
            )


def _entry(name: str, text: str) -> Text:
    """The text beside its name, wrapped under itself."""
    first, *more = textwrap.wrap(text, _TEXT_WIDTH) or [""]
    rows = [paragraph((f"{name:<13}", "bold #2ec4a6"), first)]
    return lines([*rows, *(paragraph(" " * 13 + row) for row in more)])
