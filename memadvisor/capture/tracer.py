"""One traced step: both layers on at its first boundary, off at its last, then joined into rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memadvisor.capture.account import Account, make_account
from memadvisor.capture.allocator import device_blocks
from memadvisor.capture.census import Labelled, bucket_sizes, resident_buckets, residents
from memadvisor.capture.clock import monotonic_less_wall_ns
from memadvisor.capture.collective_call import CollectiveCall, Mark
from memadvisor.capture.collectives import CollectiveLog
from memadvisor.capture.cpu_account import CpuAccount
from memadvisor.capture.default_hooks import DefaultHooks
from memadvisor.capture.idle_casts import SeenCast
from memadvisor.capture.label_log import LabelLog, Named, OperatorCall
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.ledger import Resident
from memadvisor.capture.meeting_gradients import as_added_in_place
from memadvisor.capture.memory_watch import MemoryWatch
from memadvisor.capture.module_calls import ModuleCallLog, SeenCall
from memadvisor.capture.open_spans import is_inside_operator, when_outside_operators
from memadvisor.capture.position import Position
from memadvisor.capture.saved_hooks import SavedTensorHooks
from memadvisor.capture.tensor_storage import has_wrapper, is_on, plain_tensors, storage_address
from memadvisor.capture.truth import AllocatorAccount, is_profiler_free
from memadvisor.run.living import one_look


@dataclass(frozen=True, slots=True)
class Trace:
    """What a traced step gave; `offset_ns` turns wall clock into the monotonic clock.

    `uncounted` are operators whose FLOPs could not be worked out.
    """

    account: Account
    calls: list[OperatorCall]
    collectives: list[CollectiveCall]
    module_calls: list[SeenCall]
    offset_ns: int
    uncounted: tuple[str, ...] = ()
    idle_casts: Sequence[SeenCast] = ()
    is_inflated: bool = False  # the profiler held what would have been freed (idle_casts.py)
    nestings: Sequence[tuple[int, int]] = ()  # as `LabelLog` has them
    # Hooks of the script's were asked what autograd keeps: in all of the step, or in a part.
    is_unasked: bool = False
    is_partly_unasked: bool = False


class Tracer:
    """Traces from construction to `finish` or `abandon`. Raises RuntimeError where it may not start.

    `fail` is told of what of ours raises inside of the script's operators, which go on. What is labelled `beside` what is `known` is asked
    for once, at the start: a list that the step itself makes may be of its gradients (weight_copies.py).
    `cpu` is the CPU allocator's account, where it keeps one; `mark` marks a moment on the device. Of a step that
    `is_long` the allocator's events carry no operators, of which more are seen: what an operator allocates is of the
    operator that was dispatched, whatever it calls.
    """

    def __init__(
        self,
        position: Position,
        device: torch.device,
        known: Callable[[], Iterable[Labelled]],
        *,
        beside: Callable[[], Iterable[Labelled]] = tuple,
        fail: Callable[[BaseException], None],
        cpu: CpuAccount | None,
        mark: Callable[[], Mark] | None = None,
        is_long: bool = False,
        sees_casts: bool = True,
    ) -> None:
        mode = _get_current_dispatch_mode()
        if mode is not None and not isinstance(mode, MemoryWatch):
            raise RuntimeError("the script has a dispatch mode of its own around its steps")
        self._position = position
        self._thread = threading.get_ident()
        self._device = device
        self._known = known
        self._is_long = is_long
        self._sees_casts = sees_casts and self._may_be_cast(known)
        self._cpu = cpu
        self._has_truth = is_profiler_free()
        self.log = LabelLog()
        self.collectives = CollectiveLog(mark if device.type == "cuda" else None, fail)
        self.mode = LabelMode(self.log, self.collectives, position, device, fail, is_long=is_long)
        self._hooks = SavedTensorHooks(
            self.mode, self.log, fail, also=mode.mark_saved if isinstance(mode, MemoryWatch) else None
        )
        self.mode.look_who_holds = self._hooks.holders.look
        self.module_calls = ModuleCallLog(self.mode.address)
        self._given = device_blocks(device)
        with one_look():
            self._residents: list[Resident] = residents([*known(), *beside()], device, cpu, self._given)
        self._start_allocated_bytes: int | None = None
        self.offset_ns = monotonic_less_wall_ns()
        self._end_ns: int | None = None  # where it is held
        self._default_hooks: DefaultHooks | None = None
        self._truth: AllocatorAccount | None = None  # while it records
        try:
            self._start_layers()
        except BaseException:
            self.abandon()  # a profiler that nobody stops brings the process down at its end
            raise

    def _start_layers(self) -> None:
        if self._device.type == "cuda":
            self._start_allocated_bytes = torch.cuda.memory_allocated(self._device)
        if self._has_truth:
            self._truth = AllocatorAccount(
                self._device, names_operators=not self._is_long, sees_casts=self._sees_casts
            )
            if self._device.type == "cpu":
                torch.empty(1, dtype=torch.uint8, device="cpu")  # its event carries the allocator's total
        self._start_ns = time.time_ns()
        self.collectives.watch(self.mode, self.mode.live_place)
        self.mode.__enter__()
        self._default_hooks = DefaultHooks(self._hooks.pack, self._hooks.unpack)
        self.mode.note_place()

    @staticmethod
    def _may_be_cast(known: Callable[[], Iterable[Labelled]]) -> bool:
        """Without parameters in float32 nothing could be under autocast that is not; nor is that predicted where parameters
        wrap others (DTensors)."""
        parameters = [tensor for tensor, category, _ in known() if category == "parameter"]
        is_wide = any(tensor.dtype is torch.float32 for tensor in parameters)
        return is_wide and not has_wrapper(map(type, parameters))

    def yield_profiler(self) -> None:
        """The script starts a profiler of its own: ours gives way, and the step has no truth layer."""
        self._has_truth = False
        truth, self._truth = self._truth, None
        if truth is not None:
            truth.disable()

    @property
    def start_s(self) -> float:
        """When it began, by the monotonic clock."""
        return (self._start_ns + self.offset_ns) / 1e9

    @property
    def is_full(self) -> bool:
        """Whether there were more operators than a step may remember."""
        return self.mode.is_full

    def note_place(self) -> None:
        """A module was entered or left, or the phase changed. A trace that is full ends here."""
        if not self.mode.is_full:
            self.mode.note_place()
        # The profiler is that thread's, and autograd's engine would put it back at its end.
        elif threading.get_ident() == self._thread and not is_inside_operator():
            self.yield_profiler()
            for log in (
                self.log.flat,
                self.log.saved,
                self.log.held,
                self.log.places,
                self.log.named,
                self.log.accumulated,
                self.log.nestings,
                self.module_calls.calls,
                self.module_calls.given,
            ):
                log.clear()

    def look_who_holds(self, apart: Collection[int] = (), *, must: bool = False) -> None:
        """Note what of autograd's somebody else holds too, but for storages at the addresses `apart`."""
        if self.mode.is_active:
            self._hooks.holders.look(apart, must=must)

    def can_finish(self) -> bool:
        """Whether our mode is on top; a script that opened one of its own must close it first."""
        return _get_current_dispatch_mode() is self.mode

    def hold(self) -> None:
        """The step ends here, and can be finished only where what runs now has ended."""
        self._end_ns = self._end_ns or time.time_ns()
        self.mode.is_active = False

    @property
    def is_held(self) -> bool:
        return self._end_ns is not None

    @property
    def is_whole(self) -> bool:
        """Whether the step has been seen to its end, here."""
        return self.can_finish() and not (self.is_full or self.is_held or is_inside_operator())

    def finish(self) -> Trace:
        """The step's trace. Whatever fails on the way, both layers are off afterwards."""
        try:
            return self._finish()
        except BaseException:
            self.abandon()
            raise

    def _finish(self) -> Trace:
        end_ns = self._end_ns or time.time_ns()
        final = [
            Named(end_ns, storage_address(plain), category, unit)
            for tensor, category, unit in self._known()
            for plain in plain_tensors(tensor)
            if is_on(plain, self._device) and storage_address(plain)
        ]
        hooks = self._default_hooks
        self._stop_labels()
        self.log.gather()
        has_totals = self._cpu is not None or self._device.type != "cpu"
        events = []
        truth, self._truth = self._truth, None
        if truth is not None:
            events = as_added_in_place(truth.stop(has_totals=has_totals), self.log.added_aside)
        if self._device.type == "cpu" and events and self._cpu is not None:
            self._start_allocated_bytes = events[0].allocated_bytes - events[0].delta_bytes
        buckets = bucket_sizes(self._device)
        account = make_account(
            residents=[*self._residents, *resident_buckets(self._given, self._residents, [*chain(*buckets)])],
            given_bytes={address: block.size_bytes for address, block in self._given.items()},
            events=[event for event in events if event.time_ns <= end_ns],
            log=self.log,
            given=self.module_calls.given,
            final=final,
            alive=self._alive,
            start_ns=self._start_ns if not events else min(self._start_ns, events[0].time_ns - 1),
            end_ns=end_ns,
            start_allocated_bytes=self._start_allocated_bytes if self._has_truth else None,
            offset_ns=self.offset_ns,
            device=str(self._device),
            buckets=buckets,
        )
        return Trace(
            account=account,
            calls=self.log.calls,
            collectives=self.collectives.calls,
            module_calls=self.module_calls.calls,
            offset_ns=self.offset_ns,
            uncounted=tuple(sorted(self.log.uncounted)),
            idle_casts=() if truth is None else truth.idle_casts,
            is_inflated=truth is not None and truth.is_inflated,
            nestings=self.log.nestings,
            is_unasked=hooks is not None and (hooks.is_below or (hooks.are_above and not self.log.saved)),
            is_partly_unasked=hooks is not None and hooks.are_above,
        )

    def _alive(self) -> list[Resident]:
        return residents(self._known(), self._device, self._cpu, device_blocks(self._device))

    def abandon(self) -> None:
        """Switch everything off and forget the step."""
        self.mode.is_active = False
        when_outside_operators(self._abandon)

    def _abandon(self) -> None:
        self._stop_labels()
        try:
            self.yield_profiler()
        except RuntimeError:  # torch 2.11 has the profiler of a thread that has ended no more
            if threading.get_ident() == self._thread:
                raise

    def _stop_labels(self) -> None:
        self.mode.is_active = False
        if self.can_finish():
            self.mode.__exit__(None, None, None)
        if self._default_hooks is not None:
            self._default_hooks.remove()
            self._default_hooks = None
        self.collectives.close()
