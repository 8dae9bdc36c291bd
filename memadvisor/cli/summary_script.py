"""The lines of `memadvisor show` and `memadvisor advise` about what to change in the script itself."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding

from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.cli.tables import heading
from memadvisor.tui.text import paragraph


def script_changes(changes: Sequence[ScriptChange]) -> RenderableType:
    """What was seen, what to write, and what that alone is predicted to save; the most telling first."""
    title = heading("Change in the script", "predicted, each by itself; what was seen is measured")
    return Group(title, *(_change(change) for change in changes))


def _change(change: ScriptChange) -> RenderableType:
    saved = change.saved_in_words
    return Group(
        Padding(paragraph(*(((saved, "bold"), ": ") if saved else ()), change.seen), (0, 0, 0, 1)),
        Padding(paragraph(("- ", "bold"), change.change_in_words), (0, 0, 0, 3)),
    )
