"""The Notes tab: what is damaged or absent, what the recorder wants known, and where the run came from."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from memadvisor.report.words import ranks_in_words
from memadvisor.run.run import RankRun
from memadvisor.tui.pane import Pane
from memadvisor.tui.text import lines, paragraph
from memadvisor.tui.view import View
from memadvisor.units import format_bytes

_LEVEL_STYLES = {"error": "bold #e5484d", "warning": "bold #f2c14e", "info": "bold #4c8dff"}
_NUM_RANKS_SHOWN = 64


class NotesPane(Pane):
    """One scrolling text."""

    def content(self) -> ComposeResult:
        with VerticalScroll(id="notes-scroll"):
            yield Static(id="notes-text", markup=False)

    def missing(self, view: View) -> str | None:
        return None

    def fill(self, view: View) -> None:
        self.query_one("#notes-text", Static).update(
            lines([*_problems(view), *_notes(view), Text(""), *_origin(view)])
        )


def _problems(view: View) -> list[Text]:
    rows = [paragraph(("problem ", _LEVEL_STYLES["error"]), problem) for problem in view.run.problems]
    if view.run.missing_ranks:
        missing = ranks_in_words(view.run.missing_ranks, _NUM_RANKS_SHOWN)
        rows.append(paragraph(("missing ", _LEVEL_STYLES["error"]), f"nothing readable from {missing}"))
    return rows


def _notes(view: View) -> list[Text]:
    """Each note once, with the ranks that made it."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank in view.run.ranks:
        for note in rank.notes:
            ranks_of.setdefault((note.level, note.text), []).append(rank.process.rank)
    rows = [
        paragraph(
            (f"{level} ", _LEVEL_STYLES.get(level, "bold")),
            (f"{ranks_in_words(ranks, _NUM_RANKS_SHOWN)}: ", "dim"),
            text,
        )
        for (level, text), ranks in ranks_of.items()
    ]
    return rows or ([paragraph("Nothing to note.")] if not view.run.problems else [])


def _origin(view: View) -> list[Text]:
    manifest = view.run.manifest
    rows = [
        paragraph(("script      ", "bold"), " ".join((manifest.script, *manifest.arguments))),
        paragraph(
            ("recorded    ", "bold"),
            f"{_date(manifest.created_unix_s)} by memadvisor {manifest.memadvisor_version}",
        ),
        paragraph(("directory   ", "bold"), str(view.run.path)),
        paragraph(("state       ", "bold"), view.message),
    ]
    return rows + [_process(rank) for rank in view.run.ranks[:_NUM_RANKS_SHOWN]]


def _date(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # a damaged manifest may hold any number
        return f"{unix_s} s after 1970"


def _process(rank: RankRun) -> Text:
    process = rank.process
    memory = (
        ""
        if process.device_memory_bytes is None
        else f", {format_bytes(process.device_memory_bytes)} of memory"
    )
    return paragraph(
        (f"{f'rank {process.rank}':<12}", "bold"),
        f"{process.device_name} ({process.device}{memory}) on {process.host}, pid {process.pid}, "
        f"torch {process.torch_version}, Python {process.python_version}",
    )
