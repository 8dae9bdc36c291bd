"""The Memory tab: the traced step's bytes over time, and what is alive where the cursor stands."""

from __future__ import annotations

from memadvisor.analyzers.segments import Piece, cut_step
from memadvisor.tui.chart import MemoryChart, PhaseSpan
from memadvisor.tui.drawing import CATEGORY_COLORS
from memadvisor.tui.pane import Pane, why_untraced
from memadvisor.tui.table import Column, Row, refill, row_table
from memadvisor.tui.text import number, paragraph, words
from memadvisor.tui.view import View
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.run.records import Storage
from memadvisor.units import format_bytes, format_seconds

_NUM_ALIVE = 100
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
        self._by_size: tuple[Storage, ...] = ()
        self._pieces: tuple[Piece, ...] = ()
        self._shown: tuple[int, int] | None = None

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
        if self._shown == (view.rank.process.rank, step.index):
            return  # a traced step does not change any more; the cursor stays where it is
        self._shown = (view.rank.process.rank, step.index)
        device = view.rank.process.device
        own = [storage for storage in view.rank.storages if storage.device == device]
        self._by_size = tuple(sorted(own, key=lambda storage: -storage.size_bytes))
        self._pieces = cut_step(view.rank.spans, step)
        phases = tuple(
            PhaseSpan(piece.phase, piece.start_s - timeline.start_s, piece.end_s - timeline.start_s)
            for piece in self._pieces
        )
        peak_s = view.result.peak.time_s if view.result.peak is not None else 0.0
        self.query_one(MemoryChart).draw(timeline, phases, peak_s, step.duration_s)

    @on(MemoryChart.Moved)
    def _moved(self, event: MemoryChart.Moved) -> None:
        timeline = None if self.view is None else self.view.result.timeline
        if self.view is None or timeline is None:
            return
        time_s = timeline.start_s + event.time_s
        entry = max(0, int(timeline.times_s.searchsorted(event.time_s, side="right")) - 1)
        by_category = {name: int(sizes[entry]) for name, sizes in timeline.by_category_bytes.items()}
        moment = self.query_one("#memory-moment", Static)
        moment.update(
            _moment(event.time_s, self._place(time_s), int(timeline.total_bytes[entry]), by_category)
        )
        table = self.query_one("#memory-alive", DataTable)
        refill(table, _COLUMNS, [_row(storage) for storage in self._alive(time_s)])

    def _place(self, time_s: float) -> str:
        piece = next((p for p in self._pieces if p.start_s <= time_s < p.end_s), None)
        if piece is None:
            return "outside"
        return (
            f"{piece.phase} of {piece.unit or 'the model itself'}" if piece.unit is not None else piece.phase
        )

    def _alive(self, time_s: float) -> list[Storage]:
        """The largest storages alive at a moment, as the timeline counts them."""
        found: list[Storage] = []
        for storage in self._by_size:
            if storage.birth_s <= time_s and (storage.death_s is None or time_s < storage.death_s):
                found.append(storage)
                if len(found) == _NUM_ALIVE:
                    break
        return found


def _moment(time_s: float, place: str, total_bytes: int, by_category: dict[str, int]) -> Text:
    line = paragraph((f"{format_bytes(total_bytes)}", "bold"), f" at {format_seconds(time_s)}, {place}  ")
    for name, color in CATEGORY_COLORS.items():
        if by_category.get(name, 0):
            line.append("■ ", color)
            line.append(f"{name.replace('_', ' ')} {format_bytes(by_category[name])}  ")
    return line


def _row(storage: Storage) -> Row:
    return Row(
        key=str(storage.storage_id),
        cells=(
            number(format_bytes(storage.size_bytes)),
            words(storage.category, CATEGORY_COLORS.get(storage.category, "")),
            words(storage.module or "(model)"),
            words(storage.operator or ("before the step" if storage.phase == "baseline" else "")),
            words(storage.shape),
            words(storage.dtype),
        ),
    )
