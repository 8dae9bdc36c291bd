"""Memory of parameters of stage 3 that the script holds: `p.data` that it took once, what it gave a parameter as its data
(`p.data = values`, `torch.nn.utils.vector_to_parameters`), what it had before the engine took the model over.

Without a plan that memory is the parameter's own: an average of weights that reads it finds each update, and what is written
into it is trained on. So for as long as somebody else has it, it is filled with the new values where an optimizer step ends,
and what has been written into it meanwhile, told by this rank's own elements, is taken over when all ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memadvisor.engines.sharding.flat import Flat, Slot, with_written
from memadvisor.engines.sharding.holders import held_beside, is_plain


@dataclass(slots=True, eq=False)
class _Follower:
    """`theirs`: in the parameter's shape, of the script's memory. `seen`: this rank's elements of it, as they were filled."""

    slot: Slot
    theirs: torch.Tensor
    seen: torch.Tensor


class Followers:
    """Part of an executor."""

    def __init__(self) -> None:
        self._all: list[_Follower] = []

    def add(self, slot: Slot, theirs: torch.Tensor) -> None:
        """From now on this memory is the parameter's as well, with its values in it. A tensor that cannot be is none."""
        wanted = (slot.shape, slot.flat.script_dtype, slot.flat.device)
        if is_plain(theirs) and (theirs.shape, theirs.dtype, theirs.device) == wanted:
            own = theirs.detach()
            self._all.append(_Follower(slot, own, slot.own_elements(own)))

    def drop(self, slot: Slot) -> None:
        """The script has given the parameter other memory: what it had is its own now."""
        self._all = [each for each in self._all if each.slot is not slot]

    def of(self, flat: Flat) -> bool:
        """Whether there are any."""
        return any(each.slot.flat is flat for each in self._all)

    def take(self) -> None:
        """All ranks meet: what was written goes into the shards, and what nobody else has any more is let go."""
        self._sweep()
        for each in self._all:
            flat = each.slot.flat
            found = each.slot.own_elements(each.theirs)
            if torch.equal(found.view(torch.uint8), each.seen.view(torch.uint8)):
                continue
            shard = flat.shard
            if shard is None:
                raise AssertionError("parameters of stage 3 have a shard")
            kept = each.slot.piece(shard)
            with_written(kept, found, each.seen, out=kept)
            if flat.own_shard is None and flat.page is not None:  # it was a copy
                flat.page.parameters.put_at_once(shard)
            flat.second = None  # it has the old values
            each.seen = found

    def memory_of(self, slot: Slot) -> torch.Tensor | None:
        """What the script is lent, where it has memory of the parameter already; the same by all accounts."""
        return next((each.theirs for each in reversed(self._all) if each.slot is slot), None)

    def overlay(self, slot: Slot, values: torch.Tensor) -> None:
        """Give `values` what was written since all ranks met."""
        theirs = self.memory_of(slot)
        if theirs is not None:
            values.copy_(theirs)

    def follow(self, slot: Slot, values: torch.Tensor) -> None:
        """These are the parameter's values now: it has been written into."""
        for each in self._all:
            if each.slot is slot:
                if each.theirs.data_ptr() != values.data_ptr():
                    each.theirs.copy_(values)
                each.seen = slot.own_elements(each.theirs)

    def fill(self, values_of: Callable[[Slot], torch.Tensor]) -> None:
        """An optimizer step is over. `values_of` gets a parameter's whole values; the other ranks need not take part."""
        self._sweep()
        for each in self._all:
            each.theirs.copy_(values_of(each.slot))
            each.seen = each.slot.own_elements(each.theirs)

    def _sweep(self) -> None:
        held = held_beside(each.theirs for each in self._all)
        self._all = [each for each in self._all if each.theirs.untyped_storage().data_ptr() in held]
