"""The Memory tab: the traced step's bytes over time, and what is alive where the cursor stands."""

from __future__ import annotations

from heapq import nlargest

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.analyzers.peak import alive_storages, place_at
from memadvisor.analyzers.pieces import cut_step
from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.report.peak_modules import root_or_none
from memadvisor.run.records import Storage
from memadvisor.tui.chart import MemoryChart, PhaseSpan
from memadvisor.tui.drawing import CATEGORY_COLORS
from memadvisor.tui.pane import Pane, why_untraced
from memadvisor.tui.table import Column, Row, refill, row_table
from memadvisor.tui.text import flow, legend, lines, module, number, operator, paragraph, words
from memadvisor.tui.view import View
from memadvisor.units import format_bytes, format_seconds

_NUM_ALIVE = 100
_BESIDE = 55  # columns of the screen that bytes, category and operator take
_COLUMNS = (
    Column("bytes", is_number=True),
    Column("category"),
    Column("module"),
    Column("operator"),
    Column("shape"),
    Column("dtype"),
)


class MemoryPane(Pane):
    """Chart above, a line about the cursor's moment, and the largest storages alive then."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[int, int, int] | None = None

    def content(self) -> ComposeResult:
        yield MemoryChart()
        yield Static(id="memory-moment", markup=False)
        yield row_table("memory-alive")

    def missing(self, view: View) -> str | None:
        return why_untraced(view) if view.result.timeline is None else None

    def fill(self, view: View) -> None:
        timeline, step = view.result.timeline, view.rank.traced_step
        if timeline is None or step is None:
            return
        shown = (view.rank.process.rank, step.index, len(view.rank.storages))
        chart = self.query_one(MemoryChart)
        if self._shown == shown:
            # A traced step does not change any more: the cursor stays where it is.
            self._show_moment(view, timeline, chart.cursor_s)
            return
        self._shown = shown
        phases = tuple(
            PhaseSpan(piece.phase, piece.start_s - timeline.start_s, piece.end_s - timeline.start_s)
            for piece in cut_step(view.rank.spans, step)
        )
        peak_s = view.result.peak.time_s if view.result.peak is not None else 0.0
        chart.draw(timeline, phases, peak_s, step.duration_s)

    @on(MemoryChart.Moved)
    def _moved(self, event: MemoryChart.Moved) -> None:
        if self.view is not None and self.view.result.timeline is not None:
            self._show_moment(self.view, self.view.result.timeline, event.time_s)

    def _show_moment(self, view: View, timeline: MemoryTimeline, time_s: float) -> None:
        """What is alive at a moment, in words and as a table."""
        entry = max(0, int(timeline.times_s.searchsorted(time_s, side="right")) - 1)
        clock_s = float(timeline.clock_s[entry])
        by_category = {name: int(sizes[entry]) for name, sizes in timeline.by_category_bytes.items()}
        place = place_at(view.rank, max(clock_s, timeline.start_s + time_s))
        total_bytes = int(timeline.total_bytes[entry])
        said = _moment(time_s, place, total_bytes, by_category, max(20, self.size.width - 4))
        self.query_one("#memory-moment", Static).update(lines(said))
        alive = nlargest(_NUM_ALIVE, alive_storages(view.rank, clock_s), key=lambda row: row.size_bytes)
        rows = [_row(storage, self.size.width) for storage in alive]
        refill(self.query_one("#memory-alive", DataTable), _COLUMNS, rows)


def _moment(
    time_s: float, place: str, total_bytes: int, by_category: dict[str, int], width: int
) -> list[Text]:
    line = paragraph((format_bytes(total_bytes), "bold #2ec4a6"), f" at {format_seconds(time_s)}, {place}")
    parts = [
        (name, color, format_bytes(by_category[name]))
        for name, color in CATEGORY_COLORS.items()
        if by_category.get(name)
    ]
    return [line, *flow(legend(parts), width)]


def _row(storage: Storage, width: int) -> Row:
    return Row(
        key=str(storage.storage_id),
        cells=(
            number(format_bytes(storage.size_bytes)),
            words(storage.category.replace("_", " "), CATEGORY_COLORS.get(storage.category, "")),
            module(storage.place or root_or_none(storage), width, _BESIDE),
            operator(storage.operator or ("before the step" if storage.phase == "baseline" else "")),
            words(storage.shape),
            words(storage.dtype),
        ),
    )
