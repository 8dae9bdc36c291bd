"""The memory timeline as a picture in the terminal, with a cursor that moves over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.tui.drawing import CATEGORY_COLORS, PHASE_COLORS, stacked_area
from memadvisor.units import format_bytes, format_seconds

_AXIS_WIDTH = 10
_MIN_WINDOW_S = 1e-6
_DIM = Style(color="#8b95a3")
_SHORT_PHASES = {
    "forward": "fwd",
    "backward": "bwd",
    "optimizer": "opt",
    "recompute": "rec",
    "evaluation": "eval",
    "outside": "out",
}


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of the traced step, in seconds since the step began."""

    phase: str
    start_s: float
    end_s: float


def columns_of(
    timeline: MemoryTimeline, start_s: float, end_s: float, width: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each of `width` equal stretches: the entry with most bytes in it, and when in it that holds.

    The fullest moment stands for its stretch, so that no peak is ever drawn too low.
    """
    edges = np.linspace(start_s, end_s, width + 1)
    first = np.maximum(np.searchsorted(timeline.times_s, edges[:-1], side="right") - 1, 0)
    last = np.maximum(np.searchsorted(timeline.times_s, edges[1:], side="left"), first + 1)
    fullest = np.array(
        [
            lo + int(np.argmax(timeline.total_bytes[lo:hi]))
            for lo, hi in zip(first.tolist(), last.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    # A hair inside the stretch: rounding must not put its moment into the one before.
    inside = edges[:-1] + 1e-6 * (edges[1:] - edges[:-1])
    return fullest, np.maximum(timeline.times_s[fullest], inside)


class MemoryChart(Widget, can_focus=True):
    """Bytes alive by category over the traced step: a marker row, the area, the phases, the time axis."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "Cursor", key_display="← →"),
        Binding("right", "move(1)", "Later", show=False),
        Binding("shift+left", "move(-10)", "Earlier", show=False),
        Binding("shift+right", "move(10)", "Later", show=False),
        Binding("home", "move(-100000)", "Start", show=False),
        Binding("end", "move(100000)", "End", show=False),
        Binding("p", "peak", "Peak"),
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom", key_display="+ -"),
        Binding("minus", "zoom(2)", "Zoom out", show=False),
        Binding("0", "whole", "Whole", show=False),
    ]

    class Moved(Message):
        """The cursor stands at another moment: seconds since the step began."""

        def __init__(self, time_s: float) -> None:
            super().__init__()
            self.time_s = time_s

    cursor_s: reactive[float] = reactive(0.0)

    def __init__(self) -> None:
        super().__init__()
        self.timeline: MemoryTimeline | None = None
        self.phases: tuple[PhaseSpan, ...] = ()
        self.peak_s = 0.0
        self.end_s = 0.0
        self.window_s = (0.0, 0.0)
        self._rows: list[list[Segment]] = []

    def draw(
        self, timeline: MemoryTimeline, phases: tuple[PhaseSpan, ...], peak_s: float, end_s: float
    ) -> None:
        """Show another step's timeline: all of it, with the cursor on the peak."""
        self.timeline, self.phases, self.peak_s, self.end_s = timeline, phases, peak_s, end_s
        self.window_s = (0.0, end_s)
        self.cursor_s = peak_s
        self.post_message(self.Moved(peak_s))
        self._redraw()

    def watch_cursor_s(self) -> None:
        self._redraw()

    def on_resize(self) -> None:
        self._redraw()

    def render_line(self, y: int) -> Strip:
        row = self._rows[y] if y < len(self._rows) else []
        return Strip(row).adjust_cell_length(self.size.width, self.rich_style)

    @property
    def _num_columns(self) -> int:
        return max(1, self.size.width - _AXIS_WIDTH)

    def _column_of(self, time_s: float) -> int | None:
        """The column in which a moment lies; None outside the window."""
        start_s, end_s = self.window_s
        if not start_s <= time_s <= end_s or end_s <= start_s:
            return None
        return min(self._num_columns - 1, int((time_s - start_s) / (end_s - start_s) * self._num_columns))

    def action_move(self, num_columns: int) -> None:
        column = self._column_of(self.cursor_s)
        self._move_to((column or 0) + num_columns)

    def on_click(self, event: events.Click) -> None:
        self._move_to(event.x - _AXIS_WIDTH)

    def _move_to(self, column: int) -> None:
        """Put the cursor on the fullest moment of a column."""
        if self.timeline is None:
            return
        _, moments_s = columns_of(self.timeline, *self.window_s, self._num_columns)
        self._move_cursor(float(moments_s[min(max(column, 0), len(moments_s) - 1)]))

    def _move_cursor(self, time_s: float) -> None:
        self.cursor_s = time_s
        self.post_message(self.Moved(time_s))

    def action_peak(self) -> None:
        if self._column_of(self.peak_s) is None:
            self.window_s = (0.0, self.end_s)
        self._move_cursor(self.peak_s)
        self._redraw()

    def action_zoom(self, factor: float) -> None:
        """Stretch the window by a factor, keeping the cursor where it is on the screen."""
        start_s, end_s = self.window_s
        length_s = min(self.end_s, max(_MIN_WINDOW_S, (end_s - start_s) * factor))
        if end_s <= start_s:
            return
        place = (self.cursor_s - start_s) / (end_s - start_s)
        new_start_s = min(max(0.0, self.cursor_s - place * length_s), self.end_s - length_s)
        self.window_s = (new_start_s, new_start_s + length_s)
        self._redraw()

    def action_whole(self) -> None:
        self.window_s = (0.0, self.end_s)
        self._redraw()

    def _redraw(self) -> None:
        height = self.size.height - 3
        if self.timeline is None or height < 1 or self.size.width <= _AXIS_WIDTH:
            self._rows = []
        else:
            self._rows = self._picture(self.timeline, height)
        self.refresh()

    def _picture(self, timeline: MemoryTimeline, height: int) -> list[list[Segment]]:
        entries, _ = columns_of(timeline, *self.window_s, self._num_columns)
        names = [name for name in CATEGORY_COLORS if name in timeline.by_category_bytes]
        columns = [
            {name: int(timeline.by_category_bytes[name][entry]) for name in names} for entry in entries
        ]
        top = float(timeline.total_bytes.max(initial=1))
        area = stacked_area(columns, height, top, cursor=self._column_of(self.cursor_s))
        labels = {0: format_bytes(top), height // 2: format_bytes(top * (1 - (height // 2) / height))}
        rows = [
            [Segment(f"{labels.get(position, ''):>{_AXIS_WIDTH - 1}} ", _DIM), *row]
            for position, row in enumerate(area)
        ]
        return [self._marker_row(), *rows, self._phase_row(), self._time_row()]

    def _marker_row(self) -> list[Segment]:
        """`peak` over the column where it is."""
        column = self._column_of(self.peak_s)
        if column is None:
            return []
        label = "▼ peak" if column + 6 <= self._num_columns else "peak ▼"
        start = column if label[0] == "▼" else column - 5
        blank = " " * (_AXIS_WIDTH + max(0, start))
        return [Segment(blank), Segment(label, Style(color="#e5484d", bold=True))]

    def _phase_row(self) -> list[Segment]:
        """The phase of every column; a phase's name where it has room."""
        width = self._num_columns
        start_s, end_s = self.window_s
        phases = ["outside"] * width
        for span in self.phases:
            first = int(np.floor((span.start_s - start_s) / max(end_s - start_s, _MIN_WINDOW_S) * width))
            last = int(np.ceil((span.end_s - start_s) / max(end_s - start_s, _MIN_WINDOW_S) * width))
            for column in range(max(0, first), min(width, max(last, first + 1))):
                phases[column] = span.phase
        row = [Segment(" " * _AXIS_WIDTH)]
        position = 0
        while position < width:
            end = position
            while end < width and phases[end] == phases[position]:
                end += 1
            row.append(_phase_segment(phases[position], end - position))
            position = end
        return row

    def _time_row(self) -> list[Segment]:
        start, end = format_seconds(self.window_s[0]), format_seconds(self.window_s[1])
        gap = self._num_columns - len(start) - len(end)
        return [Segment(" " * _AXIS_WIDTH), Segment(start + " " * max(1, gap) + end, _DIM)]


def _phase_segment(phase: str, width: int) -> Segment:
    """The phase's name, or a short one, where it has room for the whole of it."""
    names = (phase, _SHORT_PHASES.get(phase, ""), "")
    name = next(name for name in names if len(name) <= width)
    return Segment(name.center(width), Style(color="#10141a", bgcolor=PHASE_COLORS.get(phase, "#5b6675")))
