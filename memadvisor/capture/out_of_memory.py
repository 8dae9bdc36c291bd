"""Running out of memory: who asked for how much, where the training stood, and who held the rest.

The script's exception is only looked at. Where it is met: at the end of the innermost known module that is listened to,
of the backward, or of the script. What a script catches elsewhere (a loss outside any module, an optimizer's step) is
seen under `--memory-limit` alone. On CUDA an observer of torch's tells of the very moment; whether that was more than a
search for workspace that torch itself gave up, only the exception says.
"""

from __future__ import annotations

import os
import re
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, TypeGuard

import torch

from memadvisor.capture.cpu_account import CpuAccount
from memadvisor.capture.label_log import Place
from memadvisor.capture.live_storages import rows_of_trace, rows_of_watch, summed_up
from memadvisor.capture.memory_watch import REFUSED, MemoryWatch, Refusal
from memadvisor.capture.models import Models
from memadvisor.capture.position import Position
from memadvisor.errors import UsageError
from memadvisor.run.allocator_records import LiveStorage, OutOfMemory
from memadvisor.run.records import Storage
from memadvisor.units import parse_bytes

MOST_EVENTS = 50  # a script that searches for its batch size may run out of memory all day

_ASKED = re.compile(r"(?:Tried|tried) to allocate ([0-9.]+) ?(\w+)")
_OTHER_LIMIT = {"cuda": "device", "cpu": "host"}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Torch's own class, or the RuntimeError of its CPU allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def bytes_asked_for(error: BaseException) -> int | None:
    """What the message says; on CUDA rounded to a hundredth of its unit."""
    match = _ASKED.search(str(error))
    if match is None:
        return None
    number, unit = match.groups()
    try:
        return parse_bytes(f"{number} {'B' if unit == 'bytes' else unit}")
    except UsageError:
        return None


def place_of_failure(error: BaseException, models: Models) -> Place | None:
    """Where the training stood, by the frames that the exception has passed: the innermost that tells."""
    place = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            info = models.info(owner)
            if info is not None:
                is_again = place is not None and place.phase in ("backward", "recompute")
                place = Place("recompute" if is_again else "forward", info.name, info.unit, 0)
        elif isinstance(owner, torch.optim.Optimizer):
            place = Place("optimizer", "", "", 0)
        elif frame.f_code.co_name == "_engine_run_backward":
            place = Place("backward", "", "", 0)
    return place


class Teller(Protocol):
    """The recorder, as far as it is asked."""

    @property
    def position(self) -> Position: ...
    @property
    def step_index(self) -> int: ...
    @property
    def is_tracing(self) -> bool: ...
    def note(self, level: str, text: str) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class OutOfMemoryLog:
    """Writes an event a failure; imposes --memory-limit where there is one.

    `known` gives the storages whose category is certain, by address, as rows of an event.
    """

    def __init__(
        self,
        teller: Teller,
        write: Callable[[OutOfMemory, list[LiveStorage]], None],
        known: Callable[[int], dict[int, LiveStorage]],
        limit_bytes: int | None,
    ) -> None:
        self._teller = teller
        self._write = write
        self._known = known
        self._limit_bytes = limit_bytes
        self._device = torch.device("cpu")
        self._cpu: CpuAccount | None = None
        self._watch: MemoryWatch | None = None
        self._pid = os.getpid()
        self._num_events = 0
        self._pending: tuple[OutOfMemory, list[LiveStorage] | None] | None = None
        self._last_error = 0

    @property
    def has_events(self) -> bool:
        return self._num_events > 0

    def start(self, cpu: CpuAccount | None) -> None:
        """Watch from now on, if there is a limit."""
        self._cpu = cpu
        if self._limit_bytes is not None:
            self._teller.position.is_watched = True
            self._watch = MemoryWatch(
                self._teller.position, self._limit_bytes, self._refuse, self._teller.fail
            )
            if torch.version.cuda is None:  # else the first model tells whose memory is meant
                self._watch.cpu = cpu
            self._watch.start()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

    def meet_device(self, device: torch.device, cpu: CpuAccount | None) -> None:
        """The device of the first model: the limit is of its memory."""
        self._device, self._cpu = device, cpu
        if device.type == "cuda":
            listen_to_device(self._device_refuses)
        if self._limit_bytes is None or self._watch is None:
            return
        if device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total_bytes), device)
        elif cpu is None:
            self._teller.note(
                "warning", "--memory-limit has no effect: this build of torch does not tell its CPU total."
            )
        self._watch.cpu = cpu if device.type == "cpu" else None

    @property
    def needs_cpu_account(self) -> bool:
        return self._watch is not None and self._device.type == "cpu"

    def enter_model(self, args: Iterable[object]) -> None:
        """A new pass begins: what is raised from here on is another error, also at the last one's address."""
        self._last_error = 0
        if self._watch is not None:
            self._watch.note_inputs(args)

    def _refuse(self, refusal: Refusal) -> None:
        """The watch is about to raise."""
        try:
            event = replace(
                self._now("operators"),
                operator=refusal.operator,
                requested_bytes=refusal.requested_bytes,
                allocated_bytes=refusal.allocated_bytes,
            )
            self._put(event, self._alive())
        except Exception as error:
            self._teller.fail(error)

    def _device_refuses(self, requested_bytes: int) -> None:
        """CUDA's allocator gives up; torch may yet do without."""
        if self._pid != os.getpid():
            return
        try:
            event = replace(self._now(self._basis()), requested_bytes=requested_bytes)
            is_traced = self._teller.is_tracing and self._watch is None
            self._pending = (event, None if is_traced else self._alive())
        except Exception as error:
            self._teller.fail(error)

    def is_news(self, error: BaseException | None) -> TypeGuard[BaseException]:
        """Whether this is a failure for want of memory, met for the first time."""
        if error is None or not is_out_of_memory(error) or id(error) == self._last_error:
            return False
        self._last_error = id(error)
        return True

    def meet_again(self, error: BaseException) -> None:
        """Further out more can be told of the failure; what memory was here is kept until then."""
        self._last_error = 0
        if self._pending is None:
            self._pending = (self._failed(error), None)

    def _failed(self, error: BaseException) -> OutOfMemory:
        return replace(self._now(self._basis()), requested_bytes=bytes_asked_for(error))

    def see(self, error: BaseException, place: Place | None, storages: list[Storage] | None) -> None:
        """`place` is what the traceback tells; `storages` are those of the step that was being traced."""
        pending, self._pending = self._pending, None
        if REFUSED in str(error):  # the watch's own, which has been written
            return
        event, rows = pending or (self._failed(error), None)
        if place is not None and event.phase == "outside":  # the hooks have let it pass, or never listened
            event = replace(event, phase=place.phase, module=place.module, unit=place.unit)
        if rows is None and storages is not None and self._watch is None:
            rows, event = rows_of_trace(event.event, storages, event.time_s), replace(event, basis="trace")
        self._put(event, self._alive() if rows is None else rows)

    def _basis(self) -> str:
        return "known" if self._watch is None else "operators"

    def _alive(self) -> list[LiveStorage]:
        known = self._known(self._num_events)
        if self._watch is None:
            return list(known.values())
        return rows_of_watch(self._num_events, self._watch, known, self._device)

    def _put(self, event: OutOfMemory, rows: list[LiveStorage]) -> None:
        if self._num_events < MOST_EVENTS:
            self._num_events += 1
            self._write(event, summed_up(rows))

    def _now(self, basis: str) -> OutOfMemory:
        """Where the training stands."""
        position, device = self._teller.position, self._device
        is_cuda = device.type == "cuda"
        limit_bytes = torch.cuda.get_device_properties(device).total_memory if is_cuda else None
        if is_cuda:
            allocated_bytes: int | None = torch.cuda.memory_allocated(device)
        else:
            allocated_bytes = self._cpu.allocated_bytes() if self._cpu is not None else None
        return OutOfMemory(
            event=self._num_events,
            time_s=time.monotonic(),
            step=self._teller.step_index,
            phase=position.phase,
            module=position.module,
            unit=position.unit,
            micro_batch=position.micro_batch,
            operator="",
            requested_bytes=None,
            allocated_bytes=allocated_bytes,
            reserved_bytes=torch.cuda.memory_reserved(device) if is_cuda else None,
            limit_bytes=self._limit_bytes or limit_bytes,
            limit="--memory-limit" if self._limit_bytes else _OTHER_LIMIT.get(device.type, "device"),
            basis=basis,
        )


_listeners: list[weakref.WeakMethod[Callable[[int], None]]] = []


def listen_to_device(listener: Callable[[int], None]) -> None:
    """Tell `listener` of the bytes asked for whenever CUDA's allocator gives up, while it lives.

    torch lets nobody detach an observer, so one of ours is attached once and passes the word on.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:  # a build without CUDA
        return
    if not _listeners:
        attach(_tell)
    _listeners.append(weakref.WeakMethod(listener))


def _tell(device: int, requested_bytes: int, device_total_bytes: int, device_free_bytes: int) -> None:
    for reference in _listeners:
        listener = reference()
        if listener is not None:
            listener(requested_bytes)
