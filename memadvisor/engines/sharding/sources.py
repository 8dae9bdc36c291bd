"""Where the values of late tensors (late.py) are: on the ranks that share a parameter, or its optimizer's state."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.boxes import Box, boxes_of_run, storage_order
from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.flat import Flat, Slot
from memadvisor.engines.sharding.holders import is_held
from memadvisor.engines.sharding.late import LateTensor
from memadvisor.engines.sharding.loans import Loans
from memadvisor.engines.sharding.masters import seen_from_here, show_masters, take_written
from memadvisor.engines.sharding.own_storages import OwnStorages
from memadvisor.engines.sharding.service import AnyService
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.engines.sharding.sharded_step import MASTER

_own = OwnStorages()
_state_dict_depth = 0  # how many calls of a module's state_dict are under way


@contextlib.contextmanager
def making_state_dict() -> Iterator[bool]:
    """What is detached meanwhile stands for values that are brought when they are read. Gives whether this is the whole
    dict, and not a module's part of one."""
    global _state_dict_depth
    _state_dict_depth += 1
    try:
        yield _state_dict_depth == 1
    finally:
        _state_dict_depth -= 1


def in_state_dict() -> bool:
    return _state_dict_depth > 0


class HasFlats(Protocol):
    @property
    def flats(self) -> Sequence[Flat]: ...


def patch(executors: Iterable[HasFlats], undo: Undo) -> None:
    """What a module's state_dict names and has not here stands for values that are brought when they are read; what it
    has here shares its storage with nothing else."""
    original: Any = torch.nn.Module.state_dict

    def state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        meet_checkpoints(undo)
        with making_state_dict() as is_whole:
            named = original(module, *args, **kwargs)
        if is_whole and isinstance(named, dict):
            _own.give(named, [flat for executor in executors for flat in executor.flats])
        return named

    undo.replace(torch.nn.Module, "state_dict", state_dict)


def meet_checkpoints(undo: Undo) -> None:
    """Have checkpoints of torch.distributed share tensors out, if the script has imported them."""
    if "torch.distributed.checkpoint" in sys.modules:
        from memadvisor.engines.sharding import (
            checkpoints,  # a second of importing, which other scripts are spared
        )

        checkpoints.patch(undo)


class ShardSource:
    """What late tensors stand for: a parameter, or with `key` what optimizers keep for it under that name.

    There is one for each thing, so that tied tensors have one. kept: whole values that stay, once somebody needs them
    to. executor: whose part `lates` is, which goes on for as long as a tensor stands for what it has.
    """

    def __init__(self, lates: Lates, slot: Slot, key: str, dtype: torch.dtype, executor: object) -> None:
        self._lates = lates
        self._executor = executor
        self.slot = slot
        self.key = key
        self.dtype = dtype
        self.kept: torch.Tensor | None = None
        self.is_written = False  # by the checkpoint under way, and not read
        self.is_read_into = False  # masters, by the checkpoint under way: what parameters hold is older
        self.is_shared_out = False  # by the checkpoint under way: each rank writes or reads its own part
        self.read: tuple[int, torch.Tensor] | None = None  # a state that was read last, and after which step

    is_part = False

    @property
    def shape(self) -> torch.Size:
        return self.slot.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.slot.stride

    @property
    def device(self) -> torch.device:
        return self.slot.flat.device

    def is_live(self, slot: Slot, key: str) -> bool:
        """Whether this is what a parameter has now, or its optimizer keeps for it now."""
        # Of whichever optimizer.
        is_its = self.key == key or (bool(key) and self.key.partition(":")[2] == key)
        return self.slot is slot and is_its and self.kept is None

    def values(self) -> torch.Tensor:
        """Whole values, in the parameter's shape; the memory may be lent."""
        return self._lates.read(self) if self.kept is None else self.kept

    def keep(self) -> torch.Tensor:
        if self.kept is None:
            self.kept, self.read = _own.of(self.values(), self.slot.flat), None
        return self.kept

    def copy(self) -> torch.Tensor:
        """Whole values in memory of their own, 1-D in storage order."""
        slot = self.slot
        if self.kept is not None:
            return slot.flattened(self.kept)
        self._lates.early.read(slot.flat)
        if not self.key and slot.flat.loan is not None:
            return slot.flattened(slot.view(slot.flat.loan))
        whole = self._lates.service.fetch(slot, self.key, self.piece().to(self.dtype))
        if self.key == MASTER and slot.flat.has_masters_beside and not self.is_read_into:
            whole = seen_from_here(slot, whole)
        self._lates.announce(whole, self)
        return whole

    def piece(self) -> torch.Tensor:
        """The elements that this rank holds, 1-D; writing into them changes the model, or the optimizer."""
        flat = self.slot.flat
        if not self.key and flat.loan is None and flat.page is not None and flat.own_shard is None:
            return flat.page.parameters.read(self.slot.start, self.slot.end)
        if self.key == MASTER and flat.shard is not None and flat.page is None:
            if not self.is_read_into:
                take_written([flat])
            return self.slot.piece(flat.shard)
        own = self._lates.service.state_of(self.slot, self.key) if self.key else flat.shard
        if own is None:
            raise RuntimeError(f"the state {self.key!r} of {self.slot.name!r} has been dropped")
        if self.key:
            return own
        return self.slot.piece(own if flat.loan is None else flat.own_slice(flat.loan))

    def boxes(self) -> tuple[list[int], list[Box]]:
        """The dimensions in storage order, and what this rank holds as boxes of them."""
        slot = self.slot
        order = storage_order(slot.shape, slot.stride)
        low, high = slot.own_range
        return order, boxes_of_run(low - slot.start, high - slot.start, [slot.shape[dim] for dim in order])

    def part(self, offset: Sequence[int] | None) -> torch.Tensor:
        """What a checkpoint writes, or reads into: the box at `offset`, or all.

        torch keeps what it writes until the whole file is written; on a host it is therefore late once more.
        """
        if self.is_written and self.device.type == "cpu":
            shape = self.shape if not self.is_shared_out or offset is None else self._box(offset).shape
            return LateTensor(Part(shape, self.dtype, self.device, partial(self._part, offset)))
        return self._part(offset)

    def _part(self, offset: Sequence[int] | None) -> torch.Tensor:
        if not self.is_shared_out or offset is None:
            return self.copy().as_strided(self.slot.shape, self.slot.stride)
        return self._box(offset)

    def _box(self, offset: Sequence[int]) -> torch.Tensor:
        self._lates.early.read(self.slot.flat)
        order, boxes = self.boxes()
        start = tuple(offset[dim] for dim in order)
        box = next(box for box in boxes if box.offsets == start)
        own = self.piece()[box.first : box.first + box.num_elements].to(self.dtype).view(box.sizes)
        return own.permute([order.index(dim) for dim in range(len(order))])

    # ---- torch.distributed.checkpoint --------------------------------------------------------
    # Whoever calls these has imported it; importing it takes a second, which other scripts are spared.

    def write_items(self, fqn: str) -> Any:
        """What this rank writes of it."""
        from memadvisor.engines.sharding import checkpoints

        self.is_written = True
        if not self._share_out():
            return checkpoints.items_of_whole(fqn, self.dtype, self.shape)
        chunks = checkpoints.chunks_of(*self.boxes())
        return checkpoints.items_of_shard(fqn, self.dtype, self.shape, chunks)

    def chunks_to_read(self) -> Any:
        """What this rank reads of it: its own part, which goes into the model itself, or all."""
        from memadvisor.engines.sharding import checkpoints

        self.is_written = False
        flat = self.slot.flat
        if not self._share_out() or (flat.has_masters and not self.key):
            self.is_shared_out = False  # shards hold more digits, which the optimizer's state brings
            return [checkpoints.whole_chunk(self.shape)]
        if not self.key:
            self._lates.loans.end_one(flat)  # it has the other ranks' old values
        elif self.key == MASTER:
            take_written([flat])  # not later, as what has been read by then would be taken for old
            checkpoints.begin_loading(self)
        return checkpoints.chunks_of(*self.boxes())

    def _share_out(self) -> bool:
        """Whether each rank writes, or reads, its own part in the checkpoint under way."""
        from memadvisor.engines.sharding import checkpoints

        sharded = self._lates.sharded
        group = None if sharded.is_alone else sharded.wire.everyone
        self.is_shared_out = group is not None and self.kept is None and checkpoints.is_of_all(group)
        return self.is_shared_out

    @property
    def place(self) -> tuple[int, int]:
        """Of the shards that a checkpoint reads masters into, among all models'."""
        return self._lates.sharded.number, self.slot.flat.index

    def show_loaded(self) -> None:
        """All ranks have read masters into their shards: parameters beside them follow."""
        show_masters(self._lates.sharded.wire, self.slot.flat)


@dataclass(frozen=True, slots=True)
class Part:
    """What a checkpoint writes of a source, made when it is written."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    values: Callable[[], torch.Tensor]
    is_part: ClassVar[bool] = True
    kept: ClassVar[None] = None

    @property
    def stride(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    def keep(self) -> torch.Tensor:
        return self.values().contiguous()

    def copy(self) -> torch.Tensor:
        """1-D, in memory of its own and no more."""
        values = self.values().contiguous().reshape(-1)
        return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()

    def is_live(self, slot: Slot, key: str) -> bool:
        return False


class Lates:
    """Part of an executor: the sources that tensors of the script stand for."""

    def __init__(
        self,
        sharded: ShardedModel,
        service: AnyService,
        early: EarlyUpdates,
        loans: Loans,
        executor: weakref.ref[Any],
    ) -> None:
        self.sharded = sharded
        self.service = service
        self.early = early
        self.loans = loans
        self._executor = executor
        self._sources: weakref.WeakValueDictionary[tuple[int, str], ShardSource] = (
            weakref.WeakValueDictionary()
        )
        self._last: weakref.ref[ShardSource] | None = None
        self._thread = threading.get_ident()

    def tensor(self, slot: Slot, key: str, dtype: torch.dtype) -> torch.Tensor:
        """What stands for a parameter, or for a state of it."""
        executor, source = self._executor(), self._sources.get((slot.index, key))
        if executor is None:
            raise AssertionError("an executor that is gone makes no tensors")
        if source is None or source.kept is not None:
            source = self._sources[slot.index, key] = ShardSource(self, slot, key, dtype, executor)
        return LateTensor(source)

    def is_of(self, value: Any, slot: Slot) -> bool:
        """Whether a value is what stands for this parameter."""
        return type(value) is LateTensor and value.source.is_live(slot, "")

    def read(self, source: ShardSource) -> torch.Tensor:
        """Whole values of a source. One state is in memory at a time, and one unit's parameters (loans.py)."""
        slot, num_steps = source.slot, self.sharded.num_steps
        if threading.get_ident() != self._thread:
            # Loans are the training's own: what is written into them is kept.
            return source.copy().as_strided(slot.shape, slot.stride)
        if not source.key:
            return self.loans.lend(slot)
        if source.read is not None and source.read[0] == num_steps:
            return source.read[1]
        self.forget()
        values = source.copy().as_strided(slot.shape, slot.stride)
        source.read, self._last = (num_steps, values), weakref.ref(source)
        return values

    def announce(self, whole: torch.Tensor, source: ShardSource) -> None:
        if threading.get_ident() == self._thread:
            category = "optimizer_state" if source.key else "parameter"
            self.sharded.label(whole, category, source.slot.flat.unit)

    def keep_masters(self) -> None:
        """The shards go, and what of them no parameter holds with them."""
        for source in list(self._sources.values()):
            if source.key == MASTER:
                source.keep()

    def forget(self) -> None:
        """Let go of the state that was read last, unless the script has a view of it."""
        source = self._last() if self._last is not None else None
        if source is not None and source.read is not None:
            values = source.read[1]
            source.read = None
            if is_held(values):
                source.kept = values
        self._last = None

    def keep(self, *, states_alone: bool = False, but: Iterable[Any] = ()) -> None:
        """Bring all values here, as those whom we would ask go away or change theirs; but those of some tensors."""
        spared = {id(value.source) for value in but if type(value) is LateTensor}
        for source in list(self._sources.values()):
            if id(source) not in spared and (source.key or not states_alone):
                source.keep()

    def replace(self, whole: Callable[[Slot, str], torch.Tensor]) -> None:
        """The engine is taken off: `whole(slot, key)` is what each tensor is of from here on."""
        for source in list(self._sources.values()):
            if source.kept is None:
                source.kept, source.read = whole(source.slot, source.key), None
