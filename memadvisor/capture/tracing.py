"""The one traced step of a process: when it begins, how it ends, and what is said where it cannot be had."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from memadvisor.capture.allocator_snapshot import take_snapshot
from memadvisor.capture.census import Labelled, what_is_elsewhere
from memadvisor.capture.collective_call import Mark
from memadvisor.capture.compiled_backward import is_backward_compiled
from memadvisor.capture.cpu_account import CpuAccount
from memadvisor.capture.idle_casts import is_transforming
from memadvisor.capture.kept_beside import labelled_beside
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.later_hooks import what_begins_later
from memadvisor.capture.local_updates import LocalUpdates
from memadvisor.capture.models import Models
from memadvisor.capture.module_info import ModuleInfo
from memadvisor.capture.open_spans import is_inside_operator
from memadvisor.capture.position import Position
from memadvisor.capture.samples import LengthFirst
from memadvisor.capture.tensor_storage import PLAIN_TENSORS, sparse_parts
from memadvisor.capture.tracer import Tracer
from memadvisor.capture.writer import RankWriter, RecorderOptions, process_group_size
from memadvisor.run.records import Storage

_MOST_STEPS_TO_WAIT = 20  # for the script to end a profiler of its own
_MOST_CUT_TRACES = 3  # by want of memory
_MOST_POSTPONED = 6  # because of an end that nobody expected
_NODES_OF_LONG_STEP = (
    2_000  # autograd's; there are 4 or 5 operators a node, so the profiler takes some 100 MB of them
)
_IN_FUNC = "the one to be traced begins inside torch.func.grad or its like, where torch allows no hooks on saved tensors"
_COMPILED_BACKWARD = (
    "its backward is compiled (compiled autograd), and what a traced step asks of autograd would be compiled with it. "
    "Without torch._dynamo.config.compiled_autograd one is traced"
)
_UNASKED = (
    "The script has hooks of its own on what autograd keeps (saved_tensors_hooks) around {}, which are asked in place of "
    "ours: {} is not recorded."
)
_IN_A_MODE = "ended inside a dispatch mode of the script"

Peaks = tuple[int | None, int | None]  # allocated, reserved


class Tracing:
    """`tracer` is at work in the traced step alone; `has_trace` says whether that step could be finished.

    `known` are the tensors that somebody can name; `note` writes a note of a level into the run; `fail`
    is told of a failure of ours.
    """

    def __init__(
        self,
        options: RecorderOptions,
        position: Position,
        writer: RankWriter,
        models: Models,
        known: Callable[[], Iterable[Labelled]],
        note: Callable[[str, str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.tracer: Tracer | None = None
        self.length_first = LengthFirst()
        self.has_trace = False
        self.first_step = options.trace_step
        self._position = position
        self._writer = writer
        self._models = models
        self._known = known
        self._note = note
        self._fail = fail
        self._has_started = False
        self._num_cut = self._num_postponed = 0
        self._sees_casts = options.sees_casts
        self._script_profiles = False
        self._moved_within: Callable[[float, float], Iterable[Any]] | None = None
        self._local_updates: LocalUpdates | None = None
        self._last_node: int | None = None  # autograd's, that this thread had made when the last step ended
        self._num_nodes = 0  # in that step, as far as is known

    def note_place(self) -> None:
        if self.tracer is not None:
            self.tracer.look_who_holds(must=not self._position.backward_unit)
            self.tracer.note_place()

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """It has ended."""
        if self.tracer is not None and not self._writer.has_local_updates and process_group_size() > 1:
            self._local_updates = self._local_updates or LocalUpdates()
            self._writer.has_local_updates = self._local_updates.has(optimizer)
        self.note_place()

    def tell_transfers(self, moved_within: Callable[[float, float], Iterable[Any]]) -> None:
        """Where to ask what an engine moved between two moments."""
        self._moved_within = moved_within

    def name(self, tensor: torch.Tensor, category: str, unit: str) -> None:
        """Somebody knows what a storage is."""
        if self.tracer is None:
            return
        try:
            for part in _with_memory(tensor, self.tracer.mode):
                self.tracer.mode.name(part, category, unit)
        except Exception as error:  # an engine may say it
            self._fail(error)

    def name_known(self) -> None:
        """The tensors that somebody can name by now."""
        if self.tracer is not None:
            for tensor, category, unit in self._known():
                self.name(tensor, category, unit)

    def name_gradients(self, models: Models) -> None:
        if self.tracer is not None:
            for _, unit, parameter in models.parameters():
                if parameter.grad is not None:
                    self.name(parameter.grad, "gradient", unit)

    def enter_module(self, info: ModuleInfo, module: torch.nn.Module, args: Any) -> None:
        if self.tracer is None:
            if info.is_root and not self._has_started and is_transforming():
                self._sees_casts = False
            return
        self.length_first.see_layer(module, args)
        position = self._position
        self.tracer.look_who_holds()
        self.tracer.note_place()
        depth = len(position.stack) - 1
        self.tracer.module_calls.enter(info, args, position.phase, position.micro_batch, depth)
        if position.is_entry:
            self.tracer.log.forward_starts_ns.append(time.time_ns())

    def leave_module(
        self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, *, was_recompute: bool
    ) -> None:
        if self.tracer is None:
            return
        inputs = self.tracer.module_calls.leave(module, args, kwargs, output, len(self._position.stack))
        # The call itself still holds those.
        self.tracer.look_who_holds(inputs, must=not self._position.stack)
        self.tracer.note_place()
        if was_recompute and self._position.phase == "backward":
            self.tracer.log.recompute_ends_ns.append(time.time_ns())

    @property
    def is_over(self) -> bool:
        """Whether no further step will be traced."""
        return self._has_started and self.tracer is None

    def is_next(self, step: int) -> bool:
        """Asked where a step ends: whether `step`, the next one, is to be traced.

        It is from the chosen step on; some steps later where the script's own profiler is at work until then.
        """
        if self._has_started:
            return False
        number = _get_sequence_nr()
        if self._last_node is not None:
            self._num_nodes = max(0, number - self._last_node)
        self._last_node = number
        if step < self.first_step:
            return False
        return not self._script_profiles or step >= self.first_step + _MOST_STEPS_TO_WAIT

    def start(self, device: torch.device, cpu: CpuAccount | None, mark: Callable[[], Mark] | None) -> bool:
        """Trace from here on, with `mark` for moments on the device; False, with a note, where that is not possible."""
        self._has_started = True
        if is_backward_compiled():
            self._note("warning", f"No step was traced: {_COMPILED_BACKWARD}.")
            return False
        try:
            self.tracer = Tracer(
                self._position,
                device,
                self._known,
                beside=partial(labelled_beside, self._models),
                fail=self._fail,
                cpu=cpu,
                mark=mark,
                is_long=self._num_nodes > _NODES_OF_LONG_STEP,
                sees_casts=self._sees_casts,
            )
        except RuntimeError as error:
            why = _IN_FUNC if "torch.func" in str(error) else error
            self._note("warning", f"No step was traced: {why}.")
            return False
        self._position.is_traced = True
        self._position.settle()
        return True

    def end(
        self,
        step: int,
        device: torch.device,
        nvml: object | None,
        models: Models,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> Peaks | None:
        """Write the trace; returns the step's own peaks, None where it could not be finished."""
        tracer = self._take()
        self.has_trace = tracer is not None and tracer.is_whole
        if tracer is None or not self.has_trace:
            self._give_up(tracer)
            return None
        trace = tracer.finish()
        if trace.is_inflated:  # the next step is traced without
            self._has_started = self._sees_casts = self.has_trace = False
            return None
        if (elsewhere := what_is_elsewhere(models, device)) is not None:
            self._note("warning", elsewhere)
        if (later := what_begins_later(step)) is not None:
            self._note("warning", later)
        if trace.is_unasked:
            self._note("warning", _UNASKED.format("its steps", "what is kept for the backward"))
        elif trace.is_partly_unasked:
            self._note("warning", _UNASKED.format("a part of its steps", "what that keeps for the backward"))
        snapshot = take_snapshot(device, step, nvml)
        if snapshot is not None:
            self._writer.write_allocator(snapshot)
        self.has_trace = self._writer.write_trace(step, trace, models, optimizers)
        if self.has_trace and self._moved_within is not None:
            self._writer.write_transfers(step, self._moved_within(tracer.start_s, time.monotonic()))
        self._writer.measure_engines(device)
        self._writer.try_optimizers(device, optimizers)
        account = trace.account
        if account.peak_allocated_bytes is None:
            self._note("warning", "The allocator's total is not known in this process; no peak is recorded.")
            return None
        return account.peak_allocated_bytes, account.peak_reserved_bytes

    def must_wait(self) -> bool:
        """Whether a traced step that ends here can be finished only further out."""
        if self.tracer is None or not is_inside_operator():
            return False
        self.tracer.hold()
        return True

    def cut(self) -> list[Storage] | None:
        """The traced step ran out of memory: what it knows of the storages. A later step is traced instead."""
        tracer = self._take()
        if tracer is None:
            return None
        self._num_cut += 1
        self._has_started = self._num_cut >= _MOST_CUT_TRACES
        self._note("warning", "Memory ran out in the step that was being traced.")
        if not tracer.can_finish():
            tracer.abandon()
            return None
        return tracer.finish().account.storages

    def postpone(self, settle: Callable[[], None] = lambda: None) -> None:
        """The step that is traced had ended some while ago; a later one is traced instead. Where none ends in time, `settle`
        is called, and steps end otherwise."""
        self.drop()
        self._num_postponed += 1
        if self._num_postponed == _MOST_CUT_TRACES:
            settle()
        self._has_started = self._num_postponed >= _MOST_POSTPONED
        if self._has_started:
            self._note("warning", "No step was traced: where the steps end could not be foreseen.")

    def drop(self) -> None:
        """Take everything off, and forget the step."""
        tracer = self._take()
        if tracer is not None:
            tracer.abandon()

    def change_thread(self) -> None:
        """The training goes on in another thread than the one that is traced."""
        if self.tracer is not None:
            self._note("warning", "The training went on in another thread than its traced step began in.")
            self.postpone()

    def profiler_starts(self) -> None:
        """The script's own profiler is prepared or enabled; torch has room for one."""
        if self._script_profiles:
            return
        self._script_profiles = True
        if self.tracer is not None:
            self.tracer.yield_profiler()
            self._note(
                "warning",
                "The script started a profiler of its own; the traced step has no allocator account.",
            )

    def profiler_ends(self) -> None:
        self._script_profiles = False

    def _take(self) -> Tracer | None:
        tracer, self.tracer = self.tracer, None
        self._local_updates = None  # which would keep the script's models alive
        self._position.is_traced = False
        self._position.settle()
        return tracer

    def _give_up(self, tracer: Tracer | None) -> None:
        why, less = _IN_A_MODE, ""
        if tracer is not None:
            tracer.abandon()
            if tracer.is_held:
                why = "ran out of memory"
            elif tracer.is_full:
                why = f"had too many operators to remember, more than {tracer.mode.most_operators:,}"
                less = " A shorter step may be traced: fewer micro-batches, a shorter sequence, fewer calls of a closure."
        self._note("warning", f"The traced step {why}; it is left out, and peaks are not known.{less}")


def _with_memory(tensor: torch.Tensor, mode: LabelMode) -> tuple[torch.Tensor, ...]:
    """A sparse tensor has none itself; operators that `mode` would take for the script's tell what it holds."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is torch.strided:
        return (tensor,)
    was_active, mode.is_active = mode.is_active, False
    try:
        return sparse_parts(tensor)
    finally:
        mode.is_active = was_active
