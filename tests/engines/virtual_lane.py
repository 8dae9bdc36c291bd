"""A lane in one thread whose work is done as late as it may be, or at a moment drawn from a seed.

Every access to a storage, by compute or by work, is checked by vector clocks against all others that nothing
orders. Compute and work are watched by a dispatch mode, so no access goes unseen: of work, what counts is what
it declared, over the whole of its time, and touching anything else is an error.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[str, int]  # how far each lane is known to have come
_COMPUTE = "compute"


class OrderError(AssertionError):
    """Two accesses to one storage that nothing orders, or one that work did not declare."""


class _Buffer:
    """The last write of a storage and each lane's last read since, as (lane, its time, the operator or a word)."""

    __slots__ = ("kept", "reads", "write")

    def __init__(self, kept: torch.UntypedStorage) -> None:
        self.kept = kept  # else its address might become another's
        self.write: tuple[str, int, Any] | None = None
        self.reads: dict[str, tuple[int, Any]] = {}


class World:
    """All lanes of one case, their clocks and the storages they touch; `eagerness` is how likely a lane is to do
    its next piece of work at any one operator of the compute."""

    def __init__(self, seed: int, eagerness: float) -> None:
        self.lanes: list[VirtualLane] = []
        self.clock: Clock = {_COMPUTE: 1}
        self.is_working = False
        self.num_early = self.num_late = 0  # pieces of work done by chance, and because somebody waited
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._buffers: dict[int, _Buffer] = {}

    def lane(self, name: str = "transfers") -> VirtualLane:
        self.lanes.append(VirtualLane(self, name))
        return self.lanes[-1]

    @contextmanager
    def watched(self) -> Iterator[World]:
        """Watch all that this thread computes, and the storages that it resizes."""
        resize = torch.UntypedStorage.resize_

        def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
            self.touch(storage, True, _COMPUTE, self.clock, "resize_")
            return resize(storage, size)

        torch.UntypedStorage.resize_ = watched_resize
        try:
            with _Compute(self):
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize

    def touch(self, storage: torch.UntypedStorage, is_write: bool, who: str, clock: Clock, what: Any) -> None:
        buffer = self._buffers.get(storage._cdata)
        if buffer is None:
            buffer = self._buffers[storage._cdata] = _Buffer(storage)
        others = [buffer.write] if buffer.write is not None else []
        if is_write:
            others += [(lane, time, before) for lane, (time, before) in buffer.reads.items()]
        for lane, time, before in others:
            if lane != who and clock.get(lane, 0) < time:
                what_kind = (
                    ("written" if is_write else "read")
                    + " while it is "
                    + ("written" if (lane, time, before) == buffer.write else "read")
                )
                raise OrderError(f"a buffer is {what_kind}: {before} on {lane}, {what} on {who}")
        if is_write:
            buffer.write = (who, clock[who], what)
            buffer.reads.clear()
        else:
            buffer.reads[who] = (clock[who], what)

    def announce(self, ticket: VirtualTicket) -> None:
        """Work may begin from its submission on, so its accesses count from there."""
        for storages, is_write in ((ticket.reads, False), (ticket.writes, True)):
            for storage in storages:
                self.touch(storage, is_write, ticket.lane.name, ticket.clock, "work")

    def computed(self, func: Any, args: Any, kwargs: Any) -> None:
        self.clock[_COMPUTE] += 1
        for storage, is_write in _accesses(func, args, kwargs):
            self.touch(storage, is_write, _COMPUTE, self.clock, func)

    def perhaps_move_on(self) -> None:
        for lane in self.lanes:
            while lane.waiting and self._random.random() < self._eagerness:
                self.num_early += 1
                lane.do_next()


class VirtualTicket:
    """A piece of work; `clock` is what is over when it is over."""

    def __init__(
        self, lane: VirtualLane, work: Callable[[], Any], clock: Clock, reads: Any, writes: Any
    ) -> None:
        self.lane, self.work, self.clock = lane, work, clock
        self.reads = {tensor.untyped_storage() for tensor in reads}
        self.writes = {tensor.untyped_storage() for tensor in writes}
        self.is_over = False
        self.result: Any = None
        self.blank: list[torch.Tensor] = []

    def poison(self) -> None:
        """What is not there yet is no stale copy of what will be."""
        while self.blank:
            _poison(self.blank.pop())

    def wait(self) -> Any:
        self.lane.world.num_late += not self.is_over
        self.join()
        _advance(self.lane.world.clock, self.clock)
        return self.result

    def join(self) -> None:
        while not self.is_over:
            self.lane.do_next()


class VirtualLane:
    """As `memadvisor.engines.lanes.lanes.Lane`."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.waiting: deque[tuple[VirtualTicket, Sequence[VirtualTicket]]] = deque()
        self._clock: Clock = {name: 0}

    def submit(self, work, *, after=(), reads=(), writes=()) -> VirtualTicket:
        clock = dict(self.world.clock)  # all compute before is over
        _advance(clock, self._clock)  # work of one lane is done in order
        for other in after:
            _advance(
                clock, getattr(getattr(other, "ticket", other), "clock", {})
            )  # one of two has none itself
        clock[self.name] = self._clock[self.name] + 1
        self._clock = dict(clock)
        ticket = VirtualTicket(self, work, clock, reads, writes)
        self.world.announce(ticket)
        self.waiting.append((ticket, after))
        ticket.blank = [
            w for w in writes if w.untyped_storage() not in ticket.reads and w.is_floating_point()
        ]
        if not after:  # else what it follows may still be reading there
            ticket.poison()
        return ticket

    def run(self, work, *, reads=(), writes=()) -> Any:
        return self.submit(work, reads=reads, writes=writes).wait()

    def adopt(self, works, *, reads=(), writes=(), result=None) -> VirtualTicket:
        touched = (*reads, *writes)  # under way already: nothing of it can be poisoned any more
        return self.submit(lambda: ([work.wait() for work in works], result)[1], reads=touched, writes=writes)

    def close(self) -> None:
        while self.waiting:
            self.do_next()

    def do_next(self) -> None:
        ticket, after = self.waiting.popleft()
        for other in after:
            other.join()
        ticket.poison()
        self.world.is_working = True
        try:
            with torch.no_grad(), _Work(ticket):
                ticket.result = ticket.work()
        finally:
            self.world.is_working = False
        ticket.is_over = True


class _Watch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping Dynamo away costs more than all that we do


class _Compute(_Watch):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._world.is_working:
            return func(*args, **(kwargs or {}))
        self._world.perhaps_move_on()
        self._world.computed(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Work(_Watch):
    """Work touches nothing but what it declared, and what it made itself."""

    def __init__(self, ticket: VirtualTicket) -> None:
        super().__init__()
        self._writes = {storage._cdata for storage in ticket.writes}
        self._known = self._writes | {storage._cdata for storage in ticket.reads}
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for storage, is_write in _accesses(func, args, kwargs or {}):
            key = storage._cdata
            if key not in self._made and key not in (self._writes if is_write else self._known):
                raise OrderError(
                    f"work {'writes' if is_write else 'reads'} by {func} what it did not declare"
                )
        with torch._C._DisableTorchDispatch():  # the compute's own watch has nothing to say of work
            out = func(*args, **(kwargs or {}))
        for tensor in () if _is_view(func) else _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._made[storage._cdata] = storage
        return out


def _accesses(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.UntypedStorage, bool]]:
    """Storages that an operator reads, or writes."""
    touched = _touched.get(id(func))
    if touched is None:
        touched = _touched[id(func)] = _touched_arguments(func)
    for position, name, is_write in touched:
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in _tensors(value):
            yield tensor.untyped_storage(), is_write


# By the operators' ids, for hashing one takes as long as all the rest; torch keeps them for ever.
_touched: dict[int, list[tuple[int, str, bool]]] = {}


def _touched_arguments(func: Any) -> list[tuple[int, str, bool]]:
    """(place, name, whether it is written) of each tensor argument; a view touches none."""
    if _is_view(func):
        return []
    return [
        (position, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for position, argument in enumerate(func._schema.arguments)
        if "Tensor" in str(argument.type)
    ]


@cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _poison(tensor: torch.Tensor) -> None:
    with torch._C._DisableTorchDispatch():
        tensor.fill_(float("nan"))


def _advance(clock: Clock, other: Clock) -> None:
    for lane, time in other.items():
        clock[lane] = max(clock.get(lane, 0), time)
