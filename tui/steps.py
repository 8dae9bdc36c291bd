"""The Steps tab: every step's time and phases, newest first, with the times' shape above."""

from __future__ import annotations

from collections import defaultdict

from memadvisor.analyzers.segments import cut_step
from memadvisor.tui.drawing import PHASE_COLORS, sparkline, stacked_bar
from memadvisor.tui.pane import Pane
from memadvisor.tui.table import Column, Row, refill, row_table
from memadvisor.tui.text import flow, legend, lines, number, paragraph, words
from memadvisor.tui.view import View
from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.run.records import Span, Step
from memadvisor.units import format_bytes, format_seconds

_NUM_SHOWN = 500
_PHASES = ("forward", "recompute", "backward", "optimizer", "outside")
_COLUMNS = (
    Column("step", is_number=True),
    Column("time", is_number=True),
    *(Column(phase, is_number=True) for phase in _PHASES),
    Column("allocated", is_number=True),
    Column("peak", is_number=True),
    Column("kind"),
)


class StepsPane(Pane):
    """A sparkline of the timed steps, the median's phases, and a row a step."""

    def content(self) -> ComposeResult:
        yield Static(id="steps-summary", markup=False)
        yield row_table("steps-table")

    def missing(self, view: View) -> str | None:
        return None if view.rank.steps else "No step has ended yet."

    def fill(self, view: View) -> None:
        self.query_one("#steps-summary", Static).update(lines(_summary(view, max(20, self.size.width - 4))))
        spans_of: dict[int, list[Span]] = defaultdict(list)
        newest = view.rank.steps[-_NUM_SHOWN:]
        for span in view.rank.spans:
            if span.step >= newest[0].index:
                spans_of[span.step].append(span)
        table = self.query_one("#steps-table", DataTable)
        refill(table, _COLUMNS, [_row(step, spans_of[step.index]) for step in reversed(newest)])


def _summary(view: View, width: int) -> list[Text]:
    steps = view.rank.steps
    timed = [step.duration_s for step in steps if not step.traced]
    shown = f"; the newest {_NUM_SHOWN} are listed" if len(steps) > _NUM_SHOWN else ""
    rows = [paragraph((f"{len(steps)} steps", "bold"), f", {len(steps) - len(timed)} traced{shown}")]
    time = view.result.step_time
    if time is not None:
        rows[0].append(f"; median {format_seconds(time.median_s)} over {time.num_steps} steady ones")
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


def _row(step: Step, spans: list[Span]) -> Row:
    seconds: dict[str, float] = defaultdict(float)
    for piece in cut_step(spans, step):
        seconds[piece.phase] += piece.end_s - piece.start_s
    figures = [number(format_seconds(seconds[phase]) if phase in seconds else "") for phase in _PHASES]
    style = "dim" if step.traced else ""
    return Row(
        key=str(step.index),
        cells=(
            number(str(step.index)),
            number(format_seconds(step.duration_s), style or "bold"),
            *figures,
            number(format_bytes(step.allocated_bytes) if step.allocated_bytes is not None else "-"),
            number(format_bytes(step.peak_allocated_bytes) if step.peak_allocated_bytes is not None else "-"),
            words("traced (slow)" if step.traced else "timed", style),
        ),
    )
