"""The recorder: told by the hooks where the training stands, it keeps steps, spans and one traced step.

It gets out of the way for good at its first failure, with one line; the training goes on as if it had never been.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memadvisor.capture.around import Around
from memadvisor.capture.census import Labelled, known_tensors
from memadvisor.capture.clock import DeviceMark, clock_for
from memadvisor.capture.closed_step import ClosedStep
from memadvisor.capture.gauges import Gauges
from memadvisor.capture.hooks import Hooks
from memadvisor.capture.live_storages import rows_of_known
from memadvisor.capture.models import Models
from memadvisor.capture.open_spans import look_outside
from memadvisor.capture.out_of_memory import OutOfMemoryLog, place_of_failure
from memadvisor.capture.position import Position
from memadvisor.capture.spans import SpanLog
from memadvisor.capture.tracing import Tracing
from memadvisor.capture.unstepped import BackwardSteps, what_was_seen
from memadvisor.capture.updates import Updates
from memadvisor.capture.writer import RankWriter, RecorderOptions, say_stopped
from memadvisor.run.allocator_records import LiveStorage
from memadvisor.run.compiled import has_compiled
from memadvisor.run.say import say


class Recorder:
    """Records from construction to `finish`. Implements hooks.Observer."""

    def __init__(self, options: RecorderOptions) -> None:
        self.label_sources: list[Callable[[], Iterable[Labelled]]] = []
        # Told a micro-batch's samples until it says it is enough.
        self.on_first_batch: Callable[[int], bool] | None = None
        self._gauges = Gauges()
        self._writer = RankWriter(options)
        self._pid = os.getpid()
        self._models = Models()
        self._position = Position()
        self._around = Around(self._models, self._position)
        self._updates = Updates(lambda: [parameter for *_, parameter in self._models.parameters()])
        self._has_updated_in_pass = False  # an optimizer stepped inside the backward that is running
        self._is_end_of_step = False  # the last update is
        self._spans: SpanLog | None = None  # there is none before the first model is called
        known, writer, position = self._known_tensors, self._writer, self._position
        self._tracing = Tracing(options, position, writer, self._models, known, self.note, self.fail)
        self.change_thread, self.tell_transfers = self._tracing.change_thread, self._tracing.tell_transfers
        self.profiler_starts, self.profiler_ends = self._tracing.profiler_starts, self._tracing.profiler_ends
        self._backward_steps = BackwardSteps()
        self._is_over = False
        self._memory = OutOfMemoryLog(
            self, self._writer.write_out_of_memory, self._known_storages, options.memory_limit_bytes
        )
        self._writer.write_process(self._gauges.device)
        self.hooks = Hooks(self, self._models.is_of_model)
        self._memory.start(self._gauges.cpu)

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
        spans, position = self._spans, self._position
        info = self._models.info(module, position.stack)
        if info is None:
            begin_s = time.monotonic()
            info = self._models.discover(module, position.stack, is_traced=self.is_tracing)
            if spans is not None:  # once, where many calls go by the time of one
                spans.spend_since(begin_s)
            elif info.is_root:
                spans = self._meet_first_model()
        if info.is_around:
            self._around.is_known = True
            return
        timing = spans.begin_timing() if spans is not None else None
        position.push(info)
        if spans is not None:
            if info.is_root or info.is_unit or position.is_entry or position.is_outermost_recompute(1):
                self._models.note_order(info.unit)
                spans.enter_unit(info)
            spans.end_timing(timing)
        if info.is_root:
            self._memory.enter_model(args)
        self._tracing.enter_module(info, module, args)

    def leave_module(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        # (kwargs, output); after an exception torch leaves the kwargs out.
        kwargs, output = rest if len(rest) == 2 else ({}, rest[-1])
        position, spans = self._position, self._spans
        if not position.stack or self._around.holds(module):
            return
        if len(rest) == 1:
            self.see_failure(sys.exc_info()[1])
        begin_s = spans.begin_timing() if spans is not None else None
        was_recompute, is_entry = position.phase == "recompute", position.is_entry
        info = position.pop()
        if spans is not None:
            if info.is_root or info.is_unit or is_entry or position.is_outermost_recompute(0):
                spans.leave_unit(info, args, kwargs, output, was_recompute=was_recompute)
            spans.end_timing(begin_s)
        self._tracing.leave_module(module, args, kwargs, output, was_recompute=was_recompute)

    def enter_backward(self, is_derivative: bool, is_for_parameters: bool) -> None:
        begin_s = time.monotonic()
        if not self._position.enter_backward():
            return
        self._updates.cycle.see_backward()
        is_derivative |= self._backward_steps.enter_pass(is_for_parameters)
        if self._spans is not None:
            self._spans.enter_backward(is_derivative)
            self._spans.spend_since(begin_s)
        self._tracing.note_place()

    def leave_backward(self) -> None:
        begin_s = time.monotonic()
        position = self._position
        if not position.leave_backward():
            return
        if self._spans is not None:
            self._spans.leave_backward()
            self._spans.spend_since(begin_s)
        self._tracing.name_gradients(self._models)
        position.micro_batch += 1
        self._tracing.note_place()
        if self._spans is not None and self._has_updated_in_pass:
            self._has_updated_in_pass = False
            self._take_update(self._spans, self._spans.mark())
        elif self._spans is not None and not self._updates.have_been_seen and not position.stack:
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
        if not self._updates.have_been_seen:
            self._backward_steps.see_first_update(self.note, has_traced=self._tracing.has_trace)
        if self._updates.enter(optimizer) and self._updates.last_end is not None:
            self._end_step_late(self._updates.last_end)
        if self._updates.is_inside_another:
            return
        begin_s = time.monotonic()
        self._around.see_update(optimizer, self._spans)
        self._position.in_optimizer = True
        if self._spans is not None:
            self._spans.enter_optimizer(optimizer)
            self._spans.spend_since(begin_s)
        self._tracing.name_known()
        self._tracing.note_place()

    def leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._updates.leave(optimizer):
            return
        self._position.in_optimizer = False
        if self._spans is None:  # only now: a closure calls the model inside the step
            self._meet_uncalled_models(optimizer)
        begin_s = time.monotonic()
        self._models.meet_trained(optimizer)
        end = self._spans.leave_optimizer() if self._spans is not None else None
        self._tracing.note_update(optimizer)
        self._is_end_of_step |= self._updates.ends_step(optimizer, end)
        if self._spans is None or end is None:
            self._is_end_of_step = False
        else:
            self._spans.spend_since(begin_s)
            if self._position.backward_depth:
                self._has_updated_in_pass = True
            else:
                self._take_update(self._spans, end)

    def _take_update(self, spans: SpanLog, end: float | DeviceMark) -> None:
        """The training step ends here, or may turn out to have ended here."""
        if self._is_end_of_step:
            self._is_end_of_step = False
            self._end_step(end)
        elif self._updates.last_end is not None:
            self._updates.last_end = end
            spans.note_update()

    def see_failure(self, error: BaseException | None) -> None:
        """An exception of the script passes by; want of memory is recorded, and where the training stood."""
        if self._is_over or os.getpid() != self._pid or not self._memory.is_news(error):
            return
        try:
            if self._tracing.must_wait():
                return self._memory.meet_again(error)
            was_tracing, storages = self.is_tracing, self._tracing.cut()
            if was_tracing and self._spans is not None:
                self._spans.step.traced, self._spans.step.is_disturbed = False, True
            self._memory.see(error, place_of_failure(error, self._models), storages)
        except Exception as failure:
            self.fail(failure)

    def fail(self, error: BaseException) -> None:
        """Get out of the way for good, with one line."""
        if self._is_over:
            return
        self._is_over = True
        text = say_stopped(error)
        self._shut_down(lambda: self._writer.write_note("error", text))

    @property
    def rank(self) -> int:
        """As the launcher counts, or the script that started this process."""
        return self._writer.rank

    def label(self, tensor: torch.Tensor, category: str, unit: str) -> None:
        """An engine says what a storage is that it has just allocated."""
        self._tracing.name(tensor, category, unit)

    def note(self, level: str, text: str) -> None:
        if not self._is_over and os.getpid() == self._pid:
            self._writer.write_note(level, text)

    def finish(self, exit_code: int, exception: str | None) -> None:
        """The script has ended. Nothing happens in a forked child, or after a failure."""
        look_outside()
        if self._is_over or os.getpid() != self._pid:
            return
        self._is_over = True
        self._shut_down(lambda: self._write_end(exit_code, exception))
        if self._writer.failure is not None:  # what was not yet written could not be
            say_stopped(self._writer.failure)

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
        self.hooks.remove()
        self._tracing.drop()

    def _meet_uncalled_models(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        note = self._models.meet_uncalled(parameters, self._backward_steps.has_seen_pass)
        if note is not None:
            self._meet_first_model()
            # What it called inside itself is the model, and will be seen from now on.
            if not self._around.is_known:
                self.note("warning", note)

    def _meet_first_model(self) -> SpanLog:
        first = next(self._models.parameters(), None)
        if first is not None and first[2].device.type == "cuda":
            self._gauges.meet(first[2].device)
        self._memory.meet_device(self._gauges.device, self._gauges.device_account)
        self._spans = SpanLog(self._position, clock_for(self._gauges.device).mark, self.reach_backward_of)
        self._spans.first_batch.tell = self.on_first_batch
        self.hooks.on_first_call = self._spans.see_first_call
        self.hooks.data_waits.spans = self._spans
        self._spans.has_gradients = self._models.has_gradients
        self._spans.length_first = self._tracing.length_first
        self._writer.write_process(self._gauges.device)
        if self._tracing.first_step == 0:
            self._start_trace()
            self._spans.step.traced = self.is_tracing
            self._spans.change_clock(traced=self.is_tracing)
        return self._spans

    def _end_step_late(self, end: float | DeviceMark) -> None:
        """The step ended some while ago, and the next one is under way: what memory was then is not known."""
        if self._spans is None:
            return
        self._updates.last_end = None
        if self.is_tracing:
            self._tracing.postpone(self._updates.cycle.settle)
        step = self._spans.end_with_update(end)
        step.traced = self._spans.step.traced = False
        self._write_step(ClosedStep(step, end, None, None, None), time.monotonic())

    def _write_step(self, step: ClosedStep, now_s: float, *, at_once: bool = False) -> bool:
        """False: nothing can be written any more."""
        self._writer.add_step(step, self.hooks.data_waits.setups.take_new())
        self._writer.write_models(self._models, self._updates.living)
        self._writer.flush(now_s, force=at_once)
        if self._writer.failure is not None:
            self.fail(self._writer.failure)
        return self._writer.failure is None

    def _end_step(self, end: float | DeviceMark) -> None:
        if self._spans is None:
            return
        now_s = time.monotonic()
        step = self._spans.step
        self._spans.stop_listening(self.hooks.quiet_call_s * self.hooks.num_module_calls)
        self.hooks.num_module_calls = 0
        self.hooks.data_waits.see_models(step.index, self._models.roots)
        self._updates.last_end = None
        self._position.micro_batch = 0
        if self._position.loops is not None:
            self._models.see_loops(self._position, keeps_names=step.traced)
        counter = self._gauges.read(now_s)
        allocated_bytes, peaks = self._gauges.allocated_bytes, self._gauges.peaks
        was_traced = step.traced
        if self.is_tracing:
            gauges, living = self._gauges, self._updates.living()
            peaks = self._tracing.end(step.index, gauges.device, gauges.nvml, self._models, living) or peaks
            step.traced, step.is_disturbed = self._tracing.has_trace, not self._tracing.has_trace
            self._close_cpu_account()
        if counter is not None:
            self._writer.add_counter(counter)
        # While the account is open, the allocator itself is slower than in the script's own training.
        knows_cost = not was_traced and self._gauges.cpu is None
        closed = ClosedStep(step, end, allocated_bytes, *peaks, knows_cost=knows_cost)
        if not self._write_step(closed, now_s, at_once=was_traced):
            return
        if self._tracing.is_next(step.index + 1):
            self._start_trace()
        # Starting and writing a trace is no part of the next step.
        resume = self._spans.change_clock(traced=self.is_tracing) if was_traced or self.is_tracing else end
        self._spans.begin(step.index + 1, resume, traced=self.is_tracing)
        if not self._spans.has_unit_spans and self._position.may_be_unseen and not has_compiled():
            self._spans.be_thin()
        self.hooks.listen_to_modules(not self._spans.step.is_thin, or_first_calls=True)
        if resume is end:
            self._spans.spend_since(now_s)

    def _end_step_without_optimizer(self, spans: SpanLog) -> None:
        if self._backward_steps.ends_step(self.note):
            self._end_step(spans.mark())

    def _start_trace(self) -> None:
        gauges, mark = self._gauges, self._spans.device_mark if self._spans is not None else None
        if not self._tracing.start(gauges.device, gauges.device_account, mark):
            self._close_cpu_account()

    def _close_cpu_account(self) -> None:
        if self._is_over or (self._tracing.is_over and not self._memory.needs_cpu_account):
            self._gauges.close_cpu_account()

    def _known_storages(self, event: int) -> dict[int, LiveStorage]:
        living, device = self._updates.living(), self._gauges.device
        return rows_of_known(event, self._models, living, self.label_sources, device)

    def _known_tensors(self) -> Iterable[Labelled]:
        return known_tensors(self._models, self._updates.living(), self.label_sources)

    def _write_end(self, exit_code: int, exception: str | None) -> None:
        if self._updates.last_end is not None and self._updates.cycle.has_open_step:
            self._end_step_late(self._updates.last_end)
        if self.has_seen_a_model:
            self._writer.write_models(self._models, self._updates.living)
        if self.step_index == 0 and not self._memory.has_events:
            self._writer.write_note("warning", what_was_seen(self.has_seen_a_model, self._backward_steps))
        self._writer.write_ending(exit_code, exception, self._gauges.device)

    def _shut_down(self, last_words: Callable[[], None]) -> None:
        """Take everything off; whatever fails on the way stops nothing."""
        for action in (
            self.hooks.remove, self._tracing.drop, self._memory.stop, self._close_cpu_account, last_words, self._writer.close
        ):  # fmt: skip
            try:
                action()
            except Exception as error:
                say(f"memadvisor: {type(error).__name__} while it stopped recording")
