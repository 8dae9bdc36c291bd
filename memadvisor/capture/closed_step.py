"""A step that has ended, as rows of the journal once the device has passed its marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memadvisor.capture.clock import DeviceMark, lag_s, seconds_of
from memadvisor.capture.loader_hooks import BATCH, FIRST
from memadvisor.capture.open_step import OpenStep
from memadvisor.run.loader_records import DataWait
from memadvisor.run.records import Step

# As records.Span has them: a step of a thousandth of a second has three, and objects would take part of it.
SpanFields = tuple[int, str, str, int, float, float, bool | None]


@dataclass(slots=True)
class ClosedStep:
    """A step that has ended on the host; the device may still be at it. Nothing changes it, and it is not frozen: torch's
    own code in between has every step begin with cold caches, where a frozen one takes five times as long to make."""

    step: OpenStep
    end: float | DeviceMark
    allocated_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    knows_cost: bool = True

    def rows(self) -> tuple[Step, list[SpanFields], Sequence[DataWait]] | None:
        """The journal's rows; None while the device has not passed the step's end."""
        step = self.step
        start_s, end_s = seconds_of(step.start), seconds_of(self.end)
        if start_s is None or end_s is None:
            return None
        spans, device_lag_s = self._spans()
        row = Step(
            index=step.index,
            start_s=start_s,
            end_s=end_s,
            traced=step.traced,
            num_micro_batches=step.num_micro_batches,
            num_samples=None if step.is_thin else step.main.num_samples or None,
            num_tokens=None if step.is_thin else step.main.num_tokens or None,
            allocated_bytes=self.allocated_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            recorder_s=step.recorder_s
            if self.knows_cost and not (step.is_pieced or step.is_disturbed)
            else None,
            num_repeated_batches=0 if step.seen is None else step.seen.num_repeated,
            largest_input_elements=step.largest_input or None,
            gradient_bytes=step.gradient_bytes or None,
            device_lag_s=device_lag_s,
        )
        return row, spans, self._data_waits() if step.waits else ()

    def _spans(self) -> tuple[list[SpanFields], float | None]:
        """And how far the device was behind the host when the first optimizer began."""
        spans, index, device_lag_s = [], self.step.index, None
        for kind, unit, micro_batch, start, end, has_gradients in self.step.spans:
            start_s = seconds_of(start)
            end_s = None if end is None else seconds_of(end)
            if start_s is not None and end_s is not None:
                spans.append((index, kind, unit, micro_batch, start_s, end_s, has_gradients))
                if device_lag_s is None and kind == "optimizer":
                    device_lag_s = lag_s(start, start_s)
        return spans, device_lag_s

    def _data_waits(self) -> list[DataWait]:
        """The waits of one loader, in one phase, for one purpose are one row: a validation may have many thousands."""
        sums: dict[tuple[int, str, bool], list[Any]] = {}
        for loader, phase, is_evaluation, what, start, end, thread_s in self.step.waits or ():
            start_s, end_s = seconds_of(start), seconds_of(end)
            if start_s is None or end_s is None:
                continue
            wait_s, key = end_s - start_s, (loader, phase, is_evaluation)
            is_batch, is_first = what in (FIRST, BATCH), what == FIRST
            pass_s = 0.0 if what == BATCH else wait_s
            total = sums.get(key)
            if total is None:
                sums[key] = [int(is_batch), wait_s, thread_s, int(is_first), pass_s]
                continue
            total[0] += is_batch
            total[1] += wait_s
            total[2] += thread_s
            total[3] += is_first
            total[4] += pass_s
        return [DataWait(self.step.index, *key, *total) for key, total in sums.items()]
