"""The recorder: told by the hooks where the training stands, it keeps steps, spans and one traced step.

It gets out of the way for good at its first failure: one line, and the training goes on as if it had
never been.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memadvisor.capture.allocator import RunningPeak, counter, device_totals, open_nvml
from memadvisor.capture.census import Labelled, known_tensors, residents
from memadvisor.capture.clock import DeviceMark, clock_for
from memadvisor.capture.compiled import has_compiled
from memadvisor.capture.cpu_account import open_cpu_account
from memadvisor.capture.hooks import Hooks
from memadvisor.capture.live_storages import rows_of_known
from memadvisor.capture.models import Models
from memadvisor.capture.out_of_memory import OutOfMemoryLog, place_of_failure
from memadvisor.capture.position import Position
from memadvisor.capture.spans import ClosedStep, SpanLog
from memadvisor.capture.steps import StepCycle
from memadvisor.capture.tracing import Tracing
from memadvisor.capture.truth import is_profiler_free
from memadvisor.capture.unstepped import BackwardSteps, what_was_seen
from memadvisor.capture.writer import RankWriter, RecorderOptions
from memadvisor.run.records import LiveStorage

_COUNT_EVERY_S = 0.1


class Recorder:
    """Records from construction to `finish`. Implements hooks.Observer."""

    def __init__(self, options: RecorderOptions) -> None:
        self.label_sources: list[Callable[[], Iterable[Labelled]]] = []
        self.on_first_batch: Callable[[int], None] | None = None  # told the samples of the first micro-batch
        alive = residents((), torch.device("cpu"))
        self._cpu = open_cpu_account((block.address, block.size_bytes) for block in alive)
        self._writer = RankWriter(options)
        self._pid = os.getpid()
        self._device = torch.device("cpu")
        self._nvml: object | None = None
        self._models = Models()
        self._position = Position()
        self._cycle = StepCycle()
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._spans: SpanLog | None = None  # there is none before the first model is called
        self._tracing = Tracing(
            options.trace_step, self._position, self._writer, self._known_tensors, self.note
        )
        self._backward_steps = BackwardSteps()
        self._is_over = False
        self._last_counter_s = 0.0
        self._running_peak = RunningPeak()
        self._last_optimizer_end: float | DeviceMark | None = None
        self._memory = OutOfMemoryLog(
            self, self._writer.write_out_of_memory, self._known_storages, options.memory_limit_bytes
        )
        self._writer.write_process(self._device)
        self._hooks = Hooks(self)
        self._memory.start(self._cpu)

    # ---- what the hooks tell -------------------------------------------------------------------

    @property
    def position(self) -> Position:
        return self._position

    @property
    def step_index(self) -> int:
        return self._spans.step.index if self._spans is not None else 0

    @property
    def is_tracing(self) -> bool:
        return self._tracing.tracer is not None

    @property
    def plain_modules(self) -> set[int]:
        return self._models.plain

    def enter_module(self, module: torch.nn.Module, args: Any) -> None:
        spans = self._spans
        begin_s = spans.begin_timing() if spans is not None else None
        position = self._position
        info = self._models.info(module)
        if info is None:
            info = self._models.discover(module, is_outermost=not position.stack)
            if info.is_root and spans is None:
                spans = self._meet_first_model()
        position.push(info)
        if spans is not None:
            if info.is_root or info.is_unit or self._is_outermost_recompute(1):
                self._models.note_order(info.unit)
                spans.enter_unit(info)
            spans.end_timing(begin_s)
        if info.is_root:
            self._memory.enter_model(args)
        self._tracing.enter_module(info, args)

    def leave_module(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        # (kwargs, output); after an exception torch leaves the kwargs out.
        kwargs, output = rest if len(rest) == 2 else ({}, rest[-1])
        position, spans = self._position, self._spans
        if not position.stack:
            return
        if len(rest) == 1:
            self.see_failure(sys.exc_info()[1])
        begin_s = spans.begin_timing() if spans is not None else None
        was_recompute = position.phase == "recompute"
        info = position.pop()
        if spans is not None:
            if info.is_root or info.is_unit or self._is_outermost_recompute(0):
                spans.leave_unit(info, args, kwargs, output, was_recompute=was_recompute)
            spans.end_timing(begin_s)
        self._tracing.leave_module(args, kwargs, output, was_recompute=was_recompute)

    def enter_backward(self) -> None:
        begin_s = time.monotonic()
        position = self._position
        position.backward_depth += 1
        if position.backward_depth > 1:
            return
        position.stack_depth_before_backward = len(position.stack)
        position.backward_unit = ""
        position.settle()
        if self._spans is not None:
            self._spans.enter_backward()
            self._spans.spend_since(begin_s)
        self._tracing.note_place()

    def leave_backward(self) -> None:
        begin_s = time.monotonic()
        position = self._position
        position.backward_depth = max(0, position.backward_depth - 1)
        if position.backward_depth:
            return
        del position.stack[position.stack_depth_before_backward :]
        position.settle()
        if self._spans is not None:
            self._spans.leave_backward()
            self._spans.spend_since(begin_s)
        if self._tracing.tracer is not None:
            for _, unit, parameter in self._models.parameters():
                if parameter.grad is not None:
                    self._tracing.name(parameter.grad, "gradient", unit)
        position.micro_batch += 1
        self._tracing.note_place()
        if self._spans is not None and not self._optimizers and not position.stack:
            self._end_step_without_optimizer(self._spans)

    def reach_backward_of(self, unit: str) -> None:
        """The gradient of a unit's output is known: its backward begins."""
        if self._is_over or self._spans is None or not self._position.backward_depth:
            return
        try:
            self._position.backward_unit = unit
            self._spans.reach_backward_of(unit)
            self._tracing.note_place()
        except Exception as error:
            self.fail(error)

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._cycle.before(id(optimizer)) and self._last_optimizer_end is not None:
            self._end_step(self._last_optimizer_end, is_late=True)
        begin_s = time.monotonic()
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        self._position.in_optimizer = True
        if self._spans is not None:
            self._spans.enter_optimizer()
            self._spans.spend_since(begin_s)
        if self._tracing.tracer is not None:
            for tensor, category, unit in self._known_tensors():
                self._tracing.name(tensor, category, unit)
        self._tracing.note_place()

    def leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._position.in_optimizer = False
        if self._spans is None:  # not before: a closure calls the model inside the optimizer's step
            self._meet_uncalled_models(optimizer)
        begin_s = time.monotonic()
        end = self._spans.leave_optimizer() if self._spans is not None else begin_s
        self._tracing.note_place()
        self._last_optimizer_end = end
        if self._cycle.after(id(optimizer)):
            self._end_step(end)
        elif self._spans is not None:
            self._spans.spend_since(begin_s)

    def profiler_starts(self) -> None:
        self._tracing.profiler_starts()

    def profiler_ends(self) -> None:
        self._tracing.profiler_ends()

    def see_failure(self, error: BaseException | None) -> None:
        """An exception of the script passes by; want of memory is recorded, and where the training stood."""
        if self._is_over or os.getpid() != self._pid or not self._memory.is_news(error):
            return
        assert error is not None
        try:
            storages = None
            if self._tracing.tracer is not None:
                storages = self._tracing.cut()
                if self._spans is not None:
                    self._spans.step.traced = False
            self._memory.see(error, place_of_failure(error, self._models), storages)
        except Exception as failure:
            self.fail(failure)

    def fail(self, error: BaseException) -> None:
        """Get out of the way for good, with one line."""
        if self._is_over:
            return
        self._is_over = True
        text = " ".join(f"memadvisor stopped recording: {type(error).__name__}: {error}".split())[:300]
        os.write(2, f"{text}\n".encode(errors="replace"))
        self._shut_down(lambda: self._writer.write_note("error", text))

    # ---- what others may say --------------------------------------------------------------------

    def label(self, tensor: torch.Tensor, category: str, unit: str) -> None:
        """An engine says what a storage is that it has just allocated."""
        self._tracing.name(tensor, category, unit)

    def note(self, level: str, text: str) -> None:
        if not self._is_over and os.getpid() == self._pid:
            self._writer.write_note(level, text)

    def finish(self, exit_code: int, exception: str | None) -> None:
        """The script has ended. Nothing happens in a forked child, or after a failure."""
        if self._is_over or os.getpid() != self._pid:
            return
        self._is_over = True
        self._shut_down(lambda: self._write_end(exit_code, exception))

    @property
    def has_seen_a_model(self) -> bool:
        return self._spans is not None

    def discard(self) -> None:
        """Remove the journal of a process that turned out to be no rank of a training. After `finish`."""
        if os.getpid() == self._pid:
            self._writer.discard()

    def replaced(self, is_itself: bool) -> None:
        """Another program takes the process over: write what there is, or nothing if it starts afresh."""
        if self._is_over or os.getpid() != self._pid:
            return
        if is_itself and (self._spans is None or self._spans.step.index == 0):
            self._is_over = True
            self._shut_down(self._writer.discard)
        else:
            self.finish(0, None)

    def leave_to_parent(self) -> None:
        """In a forked child that is to have a recorder of its own: take this one's hooks off."""
        self._is_over = True
        self._hooks.remove()
        self._tracing.drop()

    # ---- inside ---------------------------------------------------------------------------------

    def _is_outermost_recompute(self, num_entered: int) -> bool:
        """Whether the module that is entered (1) or was left (0) is the first one of a recomputation."""
        position = self._position
        depth = position.stack_depth_before_backward + num_entered
        return position.backward_depth > 0 and len(position.stack) == depth

    def _meet_uncalled_models(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(parameter.grad is None for parameter in parameters):
            return  # the model is yet to be called, by the optimizer's closure
        if self._models.discover_owners(parameters):
            self._meet_first_model()
            self.note(
                "warning",
                "No call of the model was seen: it is compiled together with its caller. The time of its forward "
                "counts as outside, samples are not counted, and memory is told apart by phase alone.",
            )

    def _meet_first_model(self) -> SpanLog:
        first = next(self._models.parameters(), None)
        if first is not None and first[2].device.type == "cuda":
            self._device = first[2].device
            self._nvml = open_nvml(self._device)
            self._close_cpu_account()
        self._memory.meet_device(self._device, self._cpu)
        self._spans = SpanLog(self._position, clock_for(self._device).mark, self.reach_backward_of)
        self._spans.on_first_batch = self.on_first_batch
        self._writer.write_process(self._device)
        if self._tracing.first_step == 0:
            self._start_trace()
            self._spans.step.traced = self._tracing.tracer is not None
        return self._spans

    def _end_step(self, end: float | DeviceMark, *, is_late: bool = False) -> None:
        """`is_late`: the step ended some while ago, and the next one is under way: too late to trace it."""
        if self._spans is None:
            return
        now_s = time.monotonic()
        step = self._spans.step
        self._spans.stop_listening(self._hooks.quiet_call_s * self._hooks.num_module_calls)
        self._hooks.num_module_calls = 0
        self._last_optimizer_end = None
        self._position.micro_batch = 0
        totals = device_totals(self._device)
        allocated_bytes = (
            totals.allocated_bytes if totals else self._cpu.allocated_bytes() if self._cpu else None
        )
        peaks = self._running_peak.of_step(totals)
        was_traced = step.traced
        if self._tracing.tracer is not None:
            optimizers = self._living_optimizers()
            traced = self._tracing.end(step.index, self._device, self._nvml, self._models, optimizers)
            peaks = traced or peaks
            step.traced = self._tracing.has_trace
            self._close_cpu_account()
        if now_s - self._last_counter_s >= _COUNT_EVERY_S:
            self._last_counter_s = now_s
            self._writer.add_counter(counter(now_s, allocated_bytes, totals, self._nvml))
        # While the account is open, the allocator itself is slower than in the script's own training.
        knows_cost = not was_traced and self._cpu is None
        self._writer.add_step(ClosedStep(step, end, allocated_bytes, *peaks, knows_cost=knows_cost))
        self._writer.write_models(self._models)
        self._writer.flush(now_s, force=was_traced)
        if self._writer.failure is not None:
            self.fail(self._writer.failure)
            return
        if self._tracing.may_start(step.index + 1) and not is_late:
            self._start_trace()
        # Starting and writing a trace is no part of the next step.
        resume = self._spans.mark() if was_traced or self._tracing.tracer is not None else end
        self._spans.begin(step.index + 1, resume, traced=self._tracing.tracer is not None)
        is_thin = not self._spans.has_unit_spans and not self._position.stack and not has_compiled()
        is_thin = is_thin and not self._position.is_watched
        if is_thin:
            self._spans.be_thin()
        self._hooks.listen_to_modules(not is_thin)
        if resume is end:
            self._spans.spend_since(now_s)

    def _end_step_without_optimizer(self, spans: SpanLog) -> None:
        if self._backward_steps.after_pass():
            self.note("warning", self._backward_steps.NOTE)
        if self._backward_steps.has_begun:
            self._end_step(spans.mark())

    def _start_trace(self) -> None:
        if not self._tracing.start(self._device, self._cpu, self._spans.mark if self._spans else None):
            self._close_cpu_account()

    def _close_cpu_account(self) -> None:
        if self._memory.needs_cpu_account and not self._is_over:
            return
        cpu, self._cpu = self._cpu, None
        if cpu is not None:
            # A profiler of the script's would take what is forgotten here for frees.
            alive = residents((), torch.device("cpu"), cpu) if is_profiler_free() else []
            cpu.close(block.address for block in alive)

    def _known_storages(self, event: int) -> dict[int, LiveStorage]:
        return rows_of_known(event, self._models, self._living_optimizers(), self.label_sources, self._device)

    def _known_tensors(self) -> Iterable[Labelled]:
        return known_tensors(self._models, self._living_optimizers(), self.label_sources)

    def _living_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _write_end(self, exit_code: int, exception: str | None) -> None:
        if self._spans is not None:
            self._writer.write_models(self._models)
        if self._spans is None or self._spans.step.index == 0:
            seen = what_was_seen(
                has_model=self._spans is not None, num_passes=self._backward_steps.num_passes
            )
            self._writer.write_note("warning", f"No training step was seen: {seen}.")
        self._writer.write_ending(exit_code, exception, self._device)

    def _shut_down(self, last_words: Callable[[], None]) -> None:
        """Take everything off; whatever fails on the way stops nothing."""
        for action in (
            self._hooks.remove, self._tracing.drop, self._memory.stop, self._close_cpu_account, last_words, self._writer.close
        ):  # fmt: skip
            try:
                action()
            except Exception as error:
                os.write(2, f"memadvisor: {type(error).__name__} while it stopped recording\n".encode())
