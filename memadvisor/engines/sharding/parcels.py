"""One optimizer's state of one unit, packed into a block of a tier; and what stands for it meanwhile.

`optimizer.state` keeps its keys. In place of each tensor that has been put away there is a LateTensor (late.py), which
tells shape and dtype at once and is read from the tier when somebody needs values: so `state_dict()`, `torch.save` and
whoever looks at the state go on working, one tensor at a time. Written first, freed later: a parcel has its tensors in
memory until they are outside, and for good where that fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memadvisor.cost.paged_updates import PARCEL_ALIGNMENT_BYTES
from memadvisor.engines.lanes.lanes import EndedWell, Ticket
from memadvisor.engines.lanes.tiers import Tier
from memadvisor.engines.sharding.late import LateTensor
from memadvisor.engines.sharding.sources import Part

Failed = Callable[[OSError], None]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A tensor of the state: the name that the optimizer has for it, and its place in the parcel."""

    parameter: weakref.ref[torch.Tensor]
    key: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int  # in bytes

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, packed: torch.Tensor) -> torch.Tensor:
        """This tensor in the bytes of a whole parcel."""
        own = packed[self.start : self.start + self.size_bytes].view(self.dtype)
        return own.as_strided(self.shape, self.stride)


Found = Sequence[tuple[torch.Tensor, str, torch.Tensor]]  # parameter, key, tensor of the state


class Parcel:
    """`memory`: the tensors, while the tier has not all of them. `failed` is told where a write fails."""

    def __init__(self, tier: Tier, found: Found, failed: Failed) -> None:
        self.tier = tier
        self.entries, self.size_bytes = _laid_out(found)
        self.block = tier.allocate(self.size_bytes)
        weakref.finalize(self, tier.free, self.block).atexit = False
        self.sources = [StateSource(self, entry, found[0][0].device) for entry in self.entries]
        self.memory: list[torch.Tensor] | None = [tensor for _, _, tensor in found]
        self._failed = failed
        self._writes: list[Ticket] = [
            tier.write(self.part(entry), in_storage_order(tensor))
            for entry, tensor in zip(self.entries, self.memory, strict=True)
        ]

    def write_back(self, packed: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """Have all of it written again, from a buffer in which it has been changed; `tensors` are the views in it."""
        self.memory = tensors
        self._writes = [self.tier.write(self.block, packed[: self.size_bytes])]

    @property
    def writes(self) -> list[Ticket]:
        """Those under way."""
        return self._writes

    def settle(self) -> None:
        """Wait until the tier has all of it; what it does not take stays in memory."""
        writes, self._writes = self._writes, []
        errors = []
        for write in writes:
            try:
                write.wait()
            except OSError as error:
                errors.append(error)
        if errors:
            self._failed(errors[0])
        elif writes:
            self.memory = None

    def read_into(self, packed: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Have all of it brought into a buffer, if what `after` stands for ends well."""
        ended = [EndedWell(ticket) for ticket in after]
        return self.tier.read(self.block, packed[: self.size_bytes], after=ended)

    def part(self, entry: Entry) -> Any:
        return self.tier.part(self.block, entry.start, entry.size_bytes)


class StateSource:
    """What a LateTensor in an optimizer's state stands for. `kept`: the values, once somebody needs them to stay. `layout`: the
    DTensorSpec of what it is this rank's part of, if it is one."""

    is_part = False
    is_shared_out = False  # of a checkpoint of torch.distributed: ranks' pieces have sources of their own

    def __init__(self, parcel: Parcel, entry: Entry, device: torch.device) -> None:
        self.parcel = parcel
        self.entry = entry
        self.device = device
        self.kept: torch.Tensor | None = None
        self.is_written = False  # by the checkpoint under way, and not read
        self.layout: Any = None

    @property
    def shape(self) -> torch.Size:
        return self.entry.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.entry.stride

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    def is_live(self, slot: object, key: str) -> bool:
        """Whether this is a whole tensor of which `slot` has a piece; it is what the optimizer has itself."""
        return False

    def values(self) -> torch.Tensor:
        return self.copy().as_strided(self.shape, self.stride) if self.kept is None else self.kept

    def keep(self) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.values()
        return self.kept

    def copy(self) -> torch.Tensor:
        """The values in memory of their own, 1-D in storage order."""
        if self.kept is not None:
            return in_storage_order(self.kept).clone()
        parcel = self.parcel
        parcel.settle()
        if parcel.memory is not None:
            return in_storage_order(parcel.memory[parcel.entries.index(self.entry)]).clone()
        copied = torch.empty(self.shape.numel(), dtype=self.dtype, device=self.device)
        parcel.tier.read(parcel.part(self.entry), copied).wait()
        return copied

    # ---- torch.distributed.checkpoint --------------------------------------------------------
    # Whoever calls these has imported it; importing it takes a second, which other scripts are spared.

    def write_items(self, fqn: str) -> Any:
        from memadvisor.engines.sharding import checkpoints

        self.is_written = True
        if self.layout is not None:
            chunk = checkpoints.chunk_of_layout(self.layout)
            return checkpoints.items_of_shard(fqn, self.dtype, self.layout.shape, [chunk])
        return checkpoints.items_of_whole(fqn, self.dtype, self.shape)

    def chunks_to_read(self) -> Any:
        from memadvisor.engines.sharding import checkpoints

        self.is_written = False
        whole = self.layout is None
        return [checkpoints.whole_chunk(self.shape) if whole else checkpoints.chunk_of_layout(self.layout)]

    def part(self, offset: Sequence[int] | None) -> torch.Tensor:
        """What a checkpoint writes of it: all, made when it is written."""
        if self.is_written and self.device.type == "cpu":
            return LateTensor(Part(self.shape, self.dtype, self.device, self.values))
        return self.values()


def in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _laid_out(found: Found) -> tuple[tuple[Entry, ...], int]:
    """Places for all tensors, one after another, and the bytes that they take."""
    entries: list[Entry] = []
    start = end = 0
    for parameter, key, tensor in found:
        entry = Entry(weakref.ref(parameter), key, tensor.shape, tuple(tensor.stride()), tensor.dtype, start)
        entries.append(entry)
        end = start + entry.size_bytes
        start = -(-end // PARCEL_ALIGNMENT_BYTES) * PARCEL_ALIGNMENT_BYTES
    return tuple(entries), end
