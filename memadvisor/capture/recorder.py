"""The recorder: steps, spans and counters of every step, and one traced step after warm-up.

It is told by the hooks where the training stands, writes rows to the rank's journal, and gets out of
the way for good at its first failure: one warning, and the training goes on as if it had never been.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memadvisor.capture.allocator import DeviceTotals, counter, device_totals, enable_cpu_account, open_nvml
from memadvisor.capture.census import (
    Labelled,
    known_tensors,
    optimizer_state_rows,
    residents,
)
from memadvisor.capture.clock import DeviceClock, HostClock, Mark, clock_for
from memadvisor.capture.hooks import Hooks
from memadvisor.capture.models import Models, ModuleInfo
from memadvisor.capture.position import Position
from memadvisor.capture.rows import collective_rows, operator_rows
from memadvisor.capture.steps import StepCycle
from memadvisor.capture.tracer import Trace, Tracer
from memadvisor.run.journal import JournalWriter
from memadvisor.run.records import Counter, Ending, Note, ProcessInfo, Span, Step
from memadvisor.run.store import journal_path

_FLUSH_EVERY_S = 0.25
_COUNT_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOptions:
    """`trace_step` is the index of the traced step: two steps of warm-up before it by default."""

    directory: Path
    rank: int
    world_size: int
    local_rank: int
    trace_step: int = 2


@dataclass(slots=True)
class _OpenSpan:
    kind: str
    unit: str
    micro_batch: int
    start: Mark
    end: Mark | None = None


@dataclass(slots=True)
class _OpenStep:
    """The step that is under way."""

    index: int
    start: Mark
    traced: bool = False
    spans: list[_OpenSpan] = field(default_factory=list)
    num_forwards: int = 0
    num_samples: int | None = 0
    num_tokens: int | None = 0
    recorder_s: float = 0.0


class Recorder:
    """Records from construction to `finish`. Implements hooks.Observer."""

    def __init__(self, options: RecorderOptions) -> None:
        self.label_sources: list[Callable[[], Iterable[Labelled]]] = []
        self._options = options
        alive = residents((), torch.device("cpu"))
        self._counts_cpu = enable_cpu_account((block.address, block.size_bytes) for block in alive)
        self._journal = JournalWriter(journal_path(options.directory, options.rank))
        self._pid = os.getpid()
        self._start_s = time.monotonic()
        self._device = torch.device("cpu")
        self._clock: HostClock | DeviceClock = HostClock()
        self._nvml: object | None = None
        self._models = Models()
        self._position = Position()
        self._cycle = StepCycle()
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._step: _OpenStep | None = None
        self._closed_steps: list[tuple[_OpenStep, Mark, int | None, int | None, int | None]] = []
        self._counters: list[Counter] = []
        self._unit_stack: list[_OpenSpan] = []
        self._backward_span: _OpenSpan | None = None
        self._unit_backward: _OpenSpan | None = None
        self._tracer: Tracer | None = None
        self._described = False
        self._has_traced = False
        self._has_model = False
        self._last_flush_s = self._start_s
        self._last_counter_s = 0.0
        self._running_peak_bytes = 0
        self._failed = False
        self._last_optimizer_mark: Mark | None = None
        self._write_process_info()
        self._hooks = Hooks(self)

    # ---- what the hooks tell -------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module, args: Any) -> None:
        position = self._position
        info = self._models.info(module)
        if info is None:
            info = self._models.discover(module, is_outermost=not position.stack)
            if info.is_root and not self._has_model:
                self._meet_first_model()
        position.stack.append(info)
        if info.is_root or info.is_unit or self._is_outermost_recompute(len(position.stack) - 1):
            start_s = time.monotonic()
            self._enter_unit(info)
            if self._step is not None:
                self._step.recorder_s += time.monotonic() - start_s
        if self._tracer is not None:
            self._tracer.mode.note_place()
            if info.is_root and position.phase == "forward":
                self._tracer.log.forward_starts_ns.append(time.time_ns())

    def leave_module(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        # (kwargs, output); after an exception torch leaves the kwargs out.
        kwargs, output = rest if len(rest) == 2 else ({}, rest[-1])
        position = self._position
        if not position.stack:
            return
        was_recompute = position.phase == "recompute"
        info = position.stack.pop()
        if info.is_root or info.is_unit or self._is_outermost_recompute(len(position.stack)):
            start_s = time.monotonic()
            self._leave_unit(info, args, kwargs, output, was_recompute)
            if self._step is not None:
                self._step.recorder_s += time.monotonic() - start_s
        if self._tracer is not None:
            self._tracer.mode.note_place()
            if was_recompute and position.phase == "backward":
                self._tracer.log.recompute_ends_ns.append(time.time_ns())

    def enter_backward(self) -> None:
        position = self._position
        position.backward_depth += 1
        if position.backward_depth > 1:
            return
        position.stack_depth_before_backward = len(position.stack)
        position.backward_unit = ""
        self._backward_span = self._open_span("backward", "")
        if self._tracer is not None:
            self._tracer.mode.note_place()

    def leave_backward(self) -> None:
        position = self._position
        position.backward_depth = max(0, position.backward_depth - 1)
        if position.backward_depth:
            return
        del position.stack[position.stack_depth_before_backward :]
        mark = self._clock.mark()
        self._close_unit_backward(mark)
        if self._backward_span is not None:
            self._backward_span.end = mark
            self._backward_span = None
        if self._tracer is not None:
            for _, unit, parameter in self._models.parameters():
                if parameter.grad is not None:
                    self._tracer.mode.name(parameter.grad, "gradient", unit)
        position.micro_batch += 1
        if self._tracer is not None:
            self._tracer.mode.note_place()

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._cycle.before(id(optimizer)) and self._last_optimizer_mark is not None:
            self._end_step(self._last_optimizer_mark, is_over=True)
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        self._position.in_optimizer = True
        if self._step is not None:
            self._step.spans.append(
                _OpenSpan("optimizer", "", self._position.micro_batch, self._clock.mark())
            )
        if self._tracer is not None:
            for tensor, category, unit in self._known_tensors():
                self._tracer.mode.name(tensor, category, unit)
            self._tracer.mode.note_place()

    def leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        mark = self._clock.mark()
        self._position.in_optimizer = False
        if self._step is not None and self._step.spans and self._step.spans[-1].kind == "optimizer":
            self._step.spans[-1].end = mark
        if self._tracer is not None:
            self._tracer.mode.note_place()
        self._last_optimizer_mark = mark
        if self._cycle.after(id(optimizer)):
            self._end_step(mark)

    def profiler_starts(self) -> None:
        if self._tracer is not None:
            self._tracer.yield_profiler()
            self.note(
                "warning",
                "The script started a profiler of its own; the traced step has no allocator account.",
            )

    def fail(self, error: BaseException) -> None:
        """Get out of the way for good, with one line."""
        if self._failed:
            return
        self._failed = True
        text = f"memadvisor stopped recording: {type(error).__name__}: {error}"
        os.write(2, f"{' '.join(text.split())[:300]}\n".encode(errors="replace"))
        self._shut_down(lambda: self._journal.write_document("note", _note("error", text)))

    # ---- what others may say --------------------------------------------------------------------

    def label(self, tensor: torch.Tensor, category: str, unit: str) -> None:
        """An engine says what a storage is that it has just allocated."""
        if self._tracer is not None:
            self._tracer.mode.name(tensor, category, unit)

    def note(self, level: str, text: str) -> None:
        if not self._failed and os.getpid() == self._pid:
            self._journal.write_document("note", _note(level, text))

    def finish(self, exit_code: int | None, exception: str | None) -> None:
        """The script has ended. Nothing happens in a forked child, or after a failure."""
        if self._failed or os.getpid() != self._pid:
            return
        self._failed = True
        self._shut_down(lambda: self._write_end(exit_code, exception))

    def _is_outermost_recompute(self, depth: int) -> bool:
        """Whether a module at this depth of the stack is the first one of a recomputation."""
        position = self._position
        return position.backward_depth > 0 and depth == position.stack_depth_before_backward

    # ---- units ----------------------------------------------------------------------------------

    def _meet_first_model(self) -> None:
        self._has_model = True
        for _, _, parameter in self._models.parameters():
            if parameter.device.type == "cuda":
                self._device = parameter.device
            break
        self._clock = clock_for(self._device)
        self._nvml = open_nvml(self._device)
        self._step = _OpenStep(index=0, start=self._clock.mark())
        self._write_process_info()

    def _enter_unit(self, info: ModuleInfo) -> None:
        self._models.note_order(info.unit)
        if self._position.backward_depth:
            kind = "unit_recompute"
        elif not info.is_root:
            kind = "unit_forward"
        elif len(self._position.stack) == 1:
            kind = "forward" if torch.is_grad_enabled() else "evaluation"
        else:  # the model inside its wrapper: the wrapper's span stands for both
            self._unit_stack.append(_OpenSpan("forward", info.unit, 0, self._clock.mark()))
            return
        self._unit_stack.append(self._open_span(kind, info.unit))

    def _leave_unit(self, info: ModuleInfo, args: Any, kwargs: Any, output: Any, was_recompute: bool) -> None:
        if not self._unit_stack:
            return
        span = self._unit_stack.pop()
        span.end = self._clock.mark()
        if was_recompute or not torch.is_grad_enabled():
            return
        if info.is_root:
            self._count_inputs(args, kwargs)
        if info.is_unit:
            tensor = _first_tensor_with_grad(output)
            if tensor is not None and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_BackwardStart(weakref.ref(self), info.unit))

    def backward_reaches(self, unit: str) -> None:
        """The gradient of a unit's output is known: its backward begins."""
        if self._failed or not self._position.backward_depth:
            return
        try:
            start_s = time.monotonic()
            self._position.backward_unit = unit
            span = self._open_span("unit_backward", unit)
            self._close_unit_backward(span.start)
            self._unit_backward = span
            if self._tracer is not None:
                self._tracer.mode.note_place()
            if self._step is not None:
                self._step.recorder_s += time.monotonic() - start_s
        except Exception as error:
            self.fail(error)

    def _close_unit_backward(self, mark: Mark) -> None:
        if self._unit_backward is not None:
            self._unit_backward.end = mark
            self._unit_backward = None

    def _open_span(self, kind: str, unit: str) -> _OpenSpan:
        span = _OpenSpan(kind, unit, self._position.micro_batch, self._clock.mark())
        if self._step is not None:
            self._step.spans.append(span)
        return span

    def _count_inputs(self, args: Any, kwargs: Any) -> None:
        step = self._step
        if step is None or self._position.backward_depth or len(self._position.stack):
            return
        step.num_forwards += 1
        first = next(
            (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim() > 0), None
        )
        whole = first is not None and not first.is_floating_point() and first.dim() == 2
        step.num_samples = (
            None if first is None or step.num_samples is None else step.num_samples + first.shape[0]
        )
        step.num_tokens = (
            step.num_tokens + first.numel()
            if whole and first is not None and step.num_tokens is not None
            else None
        )

    # ---- steps ----------------------------------------------------------------------------------

    def _end_step(self, end: Mark, *, is_over: bool = False) -> None:
        """`is_over`: the step ended some while ago, and the next one is under way: too late to trace it."""
        start_s = time.monotonic()
        step = self._step
        if step is None:
            return
        self._last_optimizer_mark = None
        self._unit_stack.clear()
        totals = device_totals(self._device)
        peak_bytes, peak_reserved_bytes = self._device_peaks(totals)
        if step.traced and self._tracer is not None:
            if not self._tracer.can_finish():
                self._tracer.abandon()
                step.traced = False
                self.note(
                    "warning", "The traced step ended inside a dispatch mode of the script; it is left out."
                )
            else:
                trace_peak, trace_reserved = self._write_trace(step.index, self._tracer.finish())
                peak_bytes = trace_peak if trace_peak is not None else peak_bytes
                peak_reserved_bytes = trace_reserved if trace_reserved is not None else peak_reserved_bytes
            self._tracer = None
        if start_s - self._last_counter_s >= _COUNT_EVERY_S:
            self._last_counter_s = start_s
            self._counters.append(counter(start_s, totals, self._nvml))
        allocated_bytes = totals.allocated_bytes if totals else None
        self._closed_steps.append((step, end, allocated_bytes, peak_bytes, peak_reserved_bytes))
        if not self._described:
            self._describe_models()
        index = step.index + 1
        self._position.micro_batch = 0
        self._flush(start_s, force=step.traced)
        if not self._has_traced and index >= self._options.trace_step and not is_over:
            self._has_traced = True
            self._start_trace()
        self._step = _OpenStep(index=index, start=end, traced=self._tracer is not None)
        if step.traced or self._tracer is not None:
            # Writing the trace is no part of the next step.
            self._step.start = self._clock.mark()
        self._step.recorder_s = 0.0 if step.traced else time.monotonic() - start_s

    def _device_peaks(self, totals: DeviceTotals | None) -> tuple[int | None, int | None]:
        if totals is None:
            return None, None
        # The script may read and reset these itself, so we never reset them: a step has a peak of its
        # own only where it raised the running one.
        peak_bytes = totals.peak_allocated_bytes
        before_bytes, self._running_peak_bytes = self._running_peak_bytes, peak_bytes
        return (peak_bytes if peak_bytes > before_bytes else None), torch.cuda.max_memory_reserved(
            self._device
        )

    def _start_trace(self) -> None:
        try:
            self._tracer = Tracer(
                self._position,
                self._device,
                self._known_tensors,
                counts_cpu=self._counts_cpu,
            )
        except RuntimeError as error:
            self.note("warning", f"No step was traced: {error}.")

    def _known_tensors(self) -> Iterable[Labelled]:
        return known_tensors(self._models, self._living_optimizers(), self.label_sources)

    def _living_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    # ---- writing --------------------------------------------------------------------------------

    def _write_process_info(self) -> None:
        """Again when the model's device is known; the last one counts."""
        self._journal.write_document("process", dataclasses.asdict(self._process_info()))

    def _process_info(self) -> ProcessInfo:
        on_cuda = self._device.type == "cuda"
        properties = torch.cuda.get_device_properties(self._device) if on_cuda else None
        return ProcessInfo(
            rank=self._options.rank,
            world_size=self._options.world_size,
            local_rank=self._options.local_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self._device),
            device_name=properties.name if properties else platform.processor() or platform.machine(),
            device_memory_bytes=properties.total_memory if properties else _host_memory_bytes(),
            num_threads=torch.get_num_threads(),
            unix_offset_s=time.time() - time.monotonic(),
            start_s=self._start_s,
            torch_version=torch.__version__,
            python_version=platform.python_version(),
        )

    def _describe_models(self) -> None:
        self._described = True
        self._journal.write_rows("modules", self._models.module_rows())
        self._journal.write_rows("units", self._models.unit_rows())
        self._journal.write_rows("parameters", self._models.parameter_rows())

    def _write_trace(self, step: int, trace: Trace) -> tuple[int | None, int | None]:
        account, journal = trace.account, self._journal
        journal.write_rows("storages", account.storages)
        journal.write_rows("residuals", account.residuals)
        journal.write_rows("saved", account.saved)
        journal.write_rows("operators", operator_rows(trace))
        journal.write_rows("collectives", collective_rows(trace, step))
        journal.write_rows("optimizer_states", optimizer_state_rows(self._models, self._living_optimizers()))
        if self._device.type == "cpu" and not self._counts_cpu:
            self.note(
                "warning", "This build of torch does not count its CPU allocations; no peak is recorded."
            )
        return account.peak_allocated_bytes, account.peak_reserved_bytes

    def _flush(self, now_s: float, *, force: bool = False) -> None:
        """Write the steps whose marks the device has passed; all of them, in order."""
        if not force and now_s - self._last_flush_s < _FLUSH_EVERY_S:
            return
        self._last_flush_s = now_s
        steps: list[Step] = []
        spans: list[Span] = []
        while self._closed_steps:
            rows = _step_rows(*self._closed_steps[0])
            if rows is None:
                break  # the device has not come that far; the next flush will find it
            steps.append(rows[0])
            spans += rows[1]
            self._closed_steps.pop(0)
        self._journal.write_rows("steps", steps)
        self._journal.write_rows("spans", spans)
        self._journal.write_rows("counters", self._counters)
        self._counters.clear()
        if self._journal.failure is not None:
            self.fail(self._journal.failure)

    def _write_end(self, exit_code: int | None, exception: str | None) -> None:
        if self._device.type == "cuda" and self._closed_steps:
            torch.cuda.synchronize(self._device)
        if self._has_model and not self._described:
            self._describe_models()
        self._flush(time.monotonic(), force=True)
        ending = Ending(exit_code=exit_code or 0, exception=exception, time_s=time.monotonic())
        self._journal.write_document("ending", dataclasses.asdict(ending))

    def _shut_down(self, last_words: Callable[[], None]) -> None:
        """Take everything off; whatever fails on the way stops nothing."""
        for action in (self._hooks.remove, self._drop_tracer, last_words, self._journal.close):
            try:
                action()
            except Exception as error:
                os.write(2, f"memadvisor: {type(error).__name__} while it stopped recording\n".encode())

    def _drop_tracer(self) -> None:
        if self._tracer is not None:
            self._tracer.abandon()
            self._tracer = None


class _BackwardStart:
    """Prehook of a unit's last autograd node; knows the recorder only as long as that lives."""

    __slots__ = ("_recorder", "_unit")

    def __init__(self, recorder: weakref.ref[Recorder], unit: str) -> None:
        self._recorder = recorder
        self._unit = unit

    def __call__(self, gradients: Any) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.backward_reaches(self._unit)


def _step_rows(
    step: _OpenStep, end: Mark, allocated: int | None, peak: int | None, reserved: int | None
) -> tuple[Step, list[Span]] | None:
    start_s, end_s = step.start.time_s, end.time_s
    if start_s is None or end_s is None:
        return None
    row = Step(
        index=step.index,
        start_s=start_s,
        end_s=end_s,
        traced=step.traced,
        num_micro_batches=step.num_forwards,
        num_samples=step.num_samples or None,
        num_tokens=step.num_tokens or None,
        allocated_bytes=allocated,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        recorder_s=None if step.traced else step.recorder_s,
    )
    spans = []
    for span in step.spans:
        span_start_s, span_end_s = span.start.time_s, span.end.time_s if span.end is not None else None
        if span_start_s is not None and span_end_s is not None:
            spans.append(Span(step.index, span.kind, span.unit, span.micro_batch, span_start_s, span_end_s))
    return row, spans


def _first_tensor_with_grad(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    values = (
        output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    )
    return next((found for value in values if (found := _first_tensor_with_grad(value)) is not None), None)


def _note(level: str, text: str) -> dict[str, Any]:
    return dataclasses.asdict(Note(level=level, text=text, time_s=time.monotonic()))


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
