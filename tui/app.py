"""The terminal application: tabs over one rank of a run, which is read again as it grows."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Footer, Static, TabbedContent, TabPane, Tabs

from memadvisor.errors import RunFormatError
from memadvisor.hardware.hardware import Hardware
from memadvisor.tui.activations import ActivationsPane
from memadvisor.tui.communication import CommunicationPane
from memadvisor.tui.help import HelpScreen
from memadvisor.tui.memory import MemoryPane
from memadvisor.tui.modules import ModulesPane
from memadvisor.tui.notes import NotesPane
from memadvisor.tui.overview import OverviewPane
from memadvisor.tui.pane import Pane
from memadvisor.tui.plan import PlanPane
from memadvisor.tui.steps import StepsPane
from memadvisor.tui.style import CSS
from memadvisor.tui.text import paragraph, plain
from memadvisor.tui.view import View
from memadvisor.tui.watch import POLL_S, Snapshot, State, Watcher

_STATE_STYLES = {
    State.WAITING: ("◌", "#f2c14e"),
    State.RUNNING: ("●", "#2ec4a6"),
    State.FINISHED: ("✔", "#2ec4a6"),
    State.FAILED: ("✖", "#e5484d"),
    State.KILLED: ("✖", "#e5484d"),
    State.SILENT: ("?", "#f2c14e"),
    State.STOPPED: ("■", "#f2c14e"),
}


class RunApp(App[RunFormatError | None]):
    """`memadvisor tui RUN`. Leaves with an error where the directory turns out to be no run at all."""

    TITLE = "memadvisor"
    CSS = CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("left_square_bracket", "rank(-1)", "Rank", key_display="[ ]"),
        Binding("right_square_bracket", "rank(1)", "Next rank", show=False),
        *(
            Binding(str(number), f"tab('{name}')", name.title(), show=False)
            for number, name in enumerate(
                ("overview", "memory", "modules", "activations", "steps", "communication", "plan", "notes"), 1
            )
        ),
    ]

    class Read(Message):
        """The worker has looked at the directory; `snapshot` None: nothing new there."""

        def __init__(self, snapshot: Snapshot | None) -> None:
            super().__init__()
            self.snapshot = snapshot

    def __init__(self, directory: Path, hardware: Hardware | None = None) -> None:
        super().__init__()
        self.watcher = Watcher(directory, hardware)
        self.snapshot: Snapshot | None = None
        self.rank_number: int | None = None
        self._is_reading = False

    def compose(self) -> ComposeResult:
        yield Static(id="headline", markup=False)
        yield Static(id="waiting", markup=False)
        with TabbedContent(id="tabs", initial="overview"):
            for name, pane in (
                ("overview", OverviewPane()),
                ("memory", MemoryPane()),
                ("modules", ModulesPane()),
                ("activations", ActivationsPane()),
                ("steps", StepsPane()),
                ("communication", CommunicationPane()),
                ("plan", PlanPane()),
                ("notes", NotesPane()),
            ):
                with TabPane(name.title(), id=name):
                    yield pane
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#tabs").display = False
        self.query_one("#waiting", Static).update(paragraph("Reading ", str(self.watcher.directory)))
        self.set_interval(POLL_S, self._poll)
        self._poll()

    def _poll(self) -> None:
        if self._has_lost_terminal():
            self.exit()
        elif not self._is_reading:
            self._is_reading = True
            self._read()

    def _has_lost_terminal(self) -> bool:
        """Whether it was closed where nobody hears of that by SIGHUP, as under nohup. Textual would read from it for good."""
        return not self.is_headless and (sys.__stdin__ is None or not sys.__stdin__.isatty())

    @work(thread=True)
    def _read(self) -> None:
        """Runs in a thread: reading a big run takes seconds, and the keys must not wait for it."""
        try:
            snapshot = self.watcher.poll()
        finally:
            self._is_reading = False
        self.post_message(self.Read(snapshot))

    @on(Read)
    def _take(self, event: Read) -> None:
        """Show what was read; what was there before stays when nothing could be read now."""
        snapshot = event.snapshot
        if not self.query("#headline"):
            return  # the application is closing, and its widgets are gone already
        if snapshot is None:
            self._show_headline()
            return
        if snapshot.run is None and self.snapshot is None and snapshot.error is not None:
            self.exit(snapshot.error)
            return
        if snapshot.run is not None or self.snapshot is None or self.snapshot.run is None:
            self.snapshot = snapshot
        self._show_snapshot()

    def _show_snapshot(self) -> None:
        view = self.view
        waiting = self.query_one("#waiting", Static)
        waiting.display = view is None
        first_view = view is not None and not self.query_one("#tabs").display
        self.query_one("#tabs").display = view is not None
        self._show_headline()
        if view is None:
            message = "" if self.snapshot is None else self.snapshot.message
            waiting.update(paragraph((f"{message}\n", "bold"), f" in {self.watcher.directory}"))
            return
        self._show_pane()
        if first_view:
            self.query_one(TabbedContent).query_one(OverviewPane).focus_first()

    @property
    def view(self) -> View | None:
        """One rank of what was read last; another rank where the chosen one is not there."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.run is None or snapshot.analysis is None:
            return None
        numbers = [rank.process.rank for rank in snapshot.run.ranks]
        position = numbers.index(self.rank_number) if self.rank_number in numbers else 0
        return View(
            run=snapshot.run,
            analysis=snapshot.analysis,
            position=position,
            state=snapshot.state,
            message=snapshot.message,
        )

    def _show_headline(self) -> None:
        """Warnings before names: a narrow terminal cuts the end off."""
        snapshot, view = self.snapshot, self.view
        headline = Text(" memadvisor  ", style="bold", no_wrap=True, overflow="ellipsis")
        if snapshot is not None:
            sign, color = _STATE_STYLES[snapshot.state]
            headline.append(f"{sign} {snapshot.state}  ", color)
        if self.watcher.is_gone:
            headline.append("directory is gone; this was read last  ", "bold #e5484d")
        elif view is not None and view.run.missing_ranks:
            num_missing = len(view.run.missing_ranks)
            headline.append(f"{num_missing} rank{'s' if num_missing > 1 else ''} missing  ", "#e5484d")
        if view is not None:
            none = "no step" if view.has_ended else "no step yet"
            newest = f"step {view.rank.steps[-1].index}" if view.rank.steps else none
            rank = f"rank {view.rank.process.rank} of {view.run.manifest.world_size}"
            headline.append(f"{rank}  {newest}  ")
            headline.append(plain(PurePath(view.run.manifest.script).name), "dim")
        self.query_one("#headline", Static).update(headline)

    def _active_pane(self) -> Pane | None:
        tab = self.query_one(TabbedContent).active_pane
        return None if tab is None else tab.query_one(Pane)

    def _show_pane(self) -> None:
        """Only the tab in sight is filled; the others are when they come into sight."""
        pane, view = self._active_pane(), self.view
        if pane is not None and view is not None and not view.shows_the_same_as(pane.view):
            pane.show(view)

    @on(TabbedContent.TabActivated)
    def _tab_activated(self) -> None:
        self._show_pane()

    def action_tab(self, name: str) -> None:
        # What has the focus must not be hidden with its tab: Textual would come back to that tab.
        self.query_one(Tabs).focus()
        self.query_one(TabbedContent).active = name
        self.call_after_refresh(self._focus_pane)

    def _focus_pane(self) -> None:
        pane = self._active_pane()
        if pane is not None:
            pane.focus_first()

    def action_rank(self, offset: int) -> None:
        view = self.view
        if view is None:
            return
        position = (view.position + offset) % len(view.run.ranks)
        self.rank_number = view.run.ranks[position].process.rank
        self._show_snapshot()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())
