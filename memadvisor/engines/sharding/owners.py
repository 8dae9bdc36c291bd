"""Which rank owns which parameter of an optimizer that needs them whole, and what each rank must be sent.

A rank's *part* of a flat is made of the parameters that it owns there, one after another. What lies of it in one
rank's shard is one stretch of the part, and some runs of elements in the shard.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from memadvisor.cost.owners import Cost, cost_of, share_out
from memadvisor.engines.sharding.flat import Flat, Slot


class Owners:
    """Each parameter's owner, for one optimizer; the same on all ranks. Who has one keeps it.

    number: tells the optimizers of a process apart, the same on all ranks. has_stepped: whether other ranks' state is gone
    from this one, as it is from the first step on. has_told: of state that came back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, calls_closure_once: bool) -> None:
        self.number = number
        self.calls_closure_once = calls_closure_once
        self.has_stepped = self.has_told = False
        self._optimizer = weakref.ref(optimizer)
        self._owner: weakref.WeakKeyDictionary[Slot, int] = weakref.WeakKeyDictionary()
        self._loads: list[Cost] = []

    def assign(self, slots: Sequence[Slot]) -> bool:
        """Give an owner to those of `slots` that have none; whether there were any."""
        new = [slot for slot in slots if slot not in self._owner]
        if not new:
            return False
        num_ranks = new[0].flat.num_ranks
        self._loads = self._loads or [Cost(0, 0)] * num_ranks
        costs = [self._cost(slot) for slot in new]
        for slot, cost, owner in zip(new, costs, share_out(costs, num_ranks, self._loads), strict=True):
            self._owner[slot] = owner
            self._loads[owner] += cost
        return True

    def of(self, slot: Slot) -> int | None:
        """None before the first step, and for a parameter that is not this optimizer's."""
        return self._owner.get(slot)

    def is_elsewhere(self, slot: Slot) -> bool:
        """Whether another rank owns the parameter."""
        return self._owner.get(slot, slot.flat.rank) != slot.flat.rank

    @property
    def largest_fraction(self) -> float:
        """Of all bytes, those of the rank that owns most."""
        sizes = [load.size_bytes for load in self._loads]
        return max(sizes) / (sum(sizes) or 1)

    def _cost(self, slot: Slot) -> Cost:
        size_bytes = (slot.end - slot.start) * slot.flat.dtype.itemsize
        return cost_of(slot.shape, size_bytes, newton_schulz=isinstance(self._optimizer(), torch.optim.Muon))


class Parts:
    """The parts of one flat: `slots` are the parameters of one optimizer in it, in order of place."""

    def __init__(self, flat: Flat, slots: Sequence[Slot], owners: Owners) -> None:
        self.flat = flat
        self.slots = sorted(slots, key=lambda slot: slot.start)
        self._owned = [[s for s in self.slots if owners.of(s) == rank] for rank in range(flat.num_ranks)]

    @property
    def own_slots(self) -> list[Slot]:
        return self._owned[self.flat.rank]

    @property
    def own_numel(self) -> int:
        return sum(slot.end - slot.start for slot in self.own_slots)

    def runs(self, owner: int, rank: int) -> list[tuple[int, int]]:
        """Elements [low, high) of the flat that `owner` owns and that lie in the shard of `rank`."""
        runs: list[tuple[int, int]] = []
        for slot in self._owned[owner]:
            low, high = slot.range_on(rank)
            if runs and runs[-1][1] == low < high:
                runs[-1] = (runs[-1][0], high)
            elif low < high:
                runs.append((low, high))
        return runs

    def stretches(self, part: torch.Tensor) -> list[torch.Tensor]:
        """This rank's part, cut into what lies in each rank's shard."""
        sizes = [
            sum(high - low for low, high in self.runs(self.flat.rank, rank))
            for rank in range(self.flat.num_ranks)
        ]
        return list(torch.split(part, sizes))

    def views(self, part: torch.Tensor) -> list[tuple[Slot, torch.Tensor]]:
        """This rank's parameters as views of its part, in their own shapes and strides."""
        found, start = [], 0
        for slot in self.own_slots:
            end = start + math.prod(slot.shape)
            found.append((slot, part[start:end].as_strided(slot.shape, slot.stride)))
            start = end
        return found
