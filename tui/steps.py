"""The Steps tab: every step's time and phases, newest first, with the times' shape above."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.analyzers.pieces import cut_step
from memadvisor.run.loader_records import DataWait
from memadvisor.run.records import Span, Step
from memadvisor.tui.drawing import PHASE_COLORS, sparkline, stacked_bar
from memadvisor.tui.pane import Pane, why_no_step
from memadvisor.tui.table import Column, Row, refill, row_table
from memadvisor.tui.text import flow, legend, lines, number, paragraph
from memadvisor.tui.view import View
from memadvisor.units import format_bytes, format_seconds

_NUM_SHOWN = 500
_PHASES = ("forward", "backward", "recompute", "optimizer", "outside")
_WAIT = "data wait"  # part of outside
_AGAIN = "recompute"  # part of backward, as in the median's phases
_PHASE_KINDS = ("forward", "unit_recompute", "backward", "optimizer")


class StepsPane(Pane):
    """A sparkline of the timed steps, the median's phases, and a row a step."""

    def __init__(self) -> None:
        super().__init__()
        self._rank: int | None = None
        self._seconds: dict[int, dict[str, float]] = {}  # by step of that rank

    def content(self) -> ComposeResult:
        yield Static(id="steps-summary", markup=False)
        yield row_table("steps-table")

    def missing(self, view: View) -> str | None:
        return None if view.rank.steps else why_no_step(view)

    def fill(self, view: View) -> None:
        self.query_one("#steps-summary", Static).update(lines(_summary(view, max(20, self.size.width - 4))))
        newest = view.rank.steps[-_NUM_SHOWN:]
        if self._rank != view.rank.process.rank:
            self._rank, self._seconds = view.rank.process.rank, {}
        fresh = [step for step in newest if step.index not in self._seconds]
        self._seconds.update(phase_seconds(fresh, view.rank.spans))
        phases = [phase for phase in _PHASES if any(phase in found for found in self._seconds.values())]
        waits = waits_by_step(view.rank.data_waits)
        rows = [
            _row(step, self._seconds[step.index], phases, [waits.get(step.index)] if waits else [])
            for step in reversed(newest)
        ]
        refill(self.query_one("#steps-table", DataTable), _columns(phases, [_WAIT] if waits else []), rows)
        # The newest step's spans may still be on their way into the journal.
        del self._seconds[newest[-1].index]


def phase_seconds(steps: Sequence[Step], spans: Sequence[Span]) -> dict[int, dict[str, float]]:
    """Seconds of each phase of each step, by step. Spans are in order of time, so the newest are at the end."""
    spans_of: dict[int, list[Span]] = defaultdict(list)
    oldest = min((step.index for step in steps), default=0)
    for span in reversed(spans if steps else ()):
        if span.step < oldest:
            break
        if span.kind in _PHASE_KINDS:
            spans_of[span.step].append(span)
    found: dict[int, dict[str, float]] = {}
    for step in steps:
        seconds: dict[str, float] = defaultdict(float)
        for piece in cut_step(spans_of[step.index], step):
            seconds[piece.phase] += piece.end_s - piece.start_s
        found[step.index] = seconds
    return found


def waits_by_step(rows: Iterable[DataWait]) -> dict[int, float]:
    """Seconds of `outside` that the training waited for its DataLoaders, by step; nothing where it read none."""
    found: dict[int, float] = defaultdict(float)
    for row in rows:
        if row.phase == "outside" and not row.is_evaluation:
            found[row.step] += row.wait_s
    return dict(found)


def _summary(view: View, width: int) -> list[Text]:
    steps = view.rank.steps
    timed = [step.duration_s for step in steps if not step.traced]
    shown = f"; the newest {_NUM_SHOWN} are listed" if len(steps) > _NUM_SHOWN else ""
    rows = [
        paragraph(
            (f"{len(steps)} step{'s' if len(steps) != 1 else ''}", "bold"),
            f", {len(steps) - len(timed)} traced (*, slow){shown}",
        )
    ]
    time = view.result.step_time
    if time is not None:
        rows[0].append(f"; {format_seconds(time.median_s)}, {time.basis}")
    if timed:
        recent = timed[-width:]
        limits = f"  up to {format_seconds(max(recent))}"
        rows.append(
            paragraph((sparkline(timed, width - len(limits)), PHASE_COLORS["forward"]), (limits, "dim"))
        )
    if time is not None:
        rows.append(stacked_bar([(time.by_phase_s.get(p, 0.0), PHASE_COLORS[p]) for p in _PHASES], width))
        parts = [
            (phase, PHASE_COLORS[phase], format_seconds(time.by_phase_s[phase]))
            for phase in _PHASES
            if time.by_phase_s.get(phase, 0.0) > 0
        ]
        rows += flow(legend(parts), width)
    return rows


def _columns(phases: Sequence[str], waits: Sequence[str]) -> list[Column]:
    return [Column(title, is_number=True) for title in ("step", "time", *phases, *waits, "peak", "allocated")]


def _row(
    step: Step, seconds: Mapping[str, float], phases: Sequence[str], waits: Sequence[float | None]
) -> Row:
    style = "dim" if step.traced else ""
    sizes = (step.peak_allocated_bytes, step.allocated_bytes)
    return Row(
        key=str(step.index),
        cells=(
            number(f"*{step.index}" if step.traced else str(step.index), style),
            number(format_seconds(step.duration_s), style or "bold"),
            *(number(_of_phase(phase, seconds, phases)) for phase in phases),
            *(number("-" if wait_s is None else format_seconds(wait_s)) for wait_s in waits),
            *(number("-" if size_bytes is None else format_bytes(size_bytes)) for size_bytes in sizes),
        ),
    )


def _of_phase(phase: str, seconds: Mapping[str, float], phases: Sequence[str]) -> str:
    """Of a step in which no module was listened to, what was forward is not known, nor what was outside."""
    if phase in ("forward", "outside") and "forward" in phases and "forward" not in seconds:
        return "-"
    if phase == "backward" and phase in seconds:
        return format_seconds(seconds[phase] + seconds.get(_AGAIN, 0.0))
    return format_seconds(seconds[phase]) if phase in seconds else ""
