"""What the tabs have in common: they show a view, or say in one sentence why there is nothing to show."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Static

from memadvisor.tui.text import paragraph
from memadvisor.tui.view import View
from memadvisor.units import counted

NOT_TRACED = "No traced step yet. It follows the warm-up; what is timed already stands under Steps."
NO_STEP = "No step has ended yet."
NOT_WRITTEN = "The traced step has ended, and its record is being written."
NEVER_TRACED = "The run ended before a step was traced, so this was not recorded."
LOST_TRACE = (
    "The traced step's record is lost: profile the script again. Notes says what of the run is damaged."
)
LOST = "No traced step is in what can be read of this run: part of it is damaged, as Notes says."


class Pane(Vertical):
    """A tab's content. `show` is called with every new view while the tab is in sight."""

    def __init__(self) -> None:
        super().__init__()
        self.view: View | None = None

    def compose(self) -> ComposeResult:
        yield Static(classes="absent", markup=False)
        with Vertical(classes="content"):
            yield from self.content()

    def content(self) -> ComposeResult:
        """The widgets under the sentence that says why there is nothing."""
        raise NotImplementedError

    def missing(self, view: View) -> str | None:
        """Why this view has nothing to show here; None where it has."""
        raise NotImplementedError

    def fill(self, view: View) -> None:
        """Put the view's figures into the widgets."""
        raise NotImplementedError

    def show(self, view: View) -> None:
        self.view = view
        reason = self.missing(view)
        self.query_one(".absent", Static).update(paragraph(reason or ""))
        self.query_one(".absent").display = reason is not None
        self.query_one(".content").display = reason is None
        if reason is None:
            self.fill(view)

    def on_resize(self) -> None:
        """Bars and charts are as wide as the tab, whose size is known only once it is in sight."""
        if self.view is not None:
            self.show(self.view)

    def focus_first(self) -> None:
        """Give the keys to the first widget that takes them."""
        first = next((w for w in self.query(Widget) if w.focusable and w.is_on_screen), None)
        if first is not None:
            # It is in sight; tables that are still being laid out would have the tab scrolled away from its top.
            first.focus(scroll_visible=False)


def why_untraced(view: View, *, beside_failure: bool = False) -> str | None:
    """The sentence for figures that only a traced step has; None once there is one.

    `beside_failure`: the sentence stands under what is told of memory that ran out, and does not lead there.
    """
    if view.rank.has_lost_trace:
        return LOST_TRACE if view.has_ended else NOT_WRITTEN
    if view.rank.traced_step is not None:
        return None
    if not view.has_ended:
        return NOT_TRACED
    why = "" if beside_failure and view.result.out_of_memory else _why_ended(view)
    return LOST if view.run.problems and not why else f"{NEVER_TRACED} {why}".rstrip()


def why_no_step(view: View, *, beside_failure: bool = False) -> str:
    """The sentence where no step has ended; `beside_failure` as in `why_untraced`."""
    why = "" if beside_failure and view.result.out_of_memory else _why_ended(view)
    return f"The run ended before a step had. {why}".rstrip() if view.has_ended else NO_STEP


def _why_ended(view: View) -> str:
    """What is known of that: memory, or the recorder's warnings where it met no step; else "", as under Notes."""
    if view.result.out_of_memory:
        return "It ran out of memory: Overview says where, and what held it."
    if view.rank.steps:
        option = view.rank.trace_option
        return (
            f"`profile {option}` traces one of its {counted(len(view.rank.steps), 'step')}." if option else ""
        )
    return " ".join(note.text for note in view.rank.notes if note.level in ("warning", "error"))
