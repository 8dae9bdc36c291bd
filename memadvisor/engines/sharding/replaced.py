"""Parameters that the script has put elsewhere: `p.data = values`, `torch.nn.utils.vector_to_parameters`.

Those of stages 1 and 2 are views of their unit's flat, which updates and gathers work on. What the script gives such a
parameter in place of its view stays the parameter's memory, as without a plan: whoever else holds it sees each update.
So an optimizer step begins with the values copied into the flat, and ends with the new ones copied back. With stage 3
the engine sees the assignment itself (released.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch

from memadvisor.engines.sharding.flat import Flat, Slot
from memadvisor.errors import PlanError


class Replaced:
    """Part of an executor: its parameters that lie elsewhere between steps."""

    def __init__(self) -> None:
        # By index of the slot: its memory between steps.
        self._theirs: dict[int, tuple[Slot, torch.Tensor]] = {}

    def take_values(self, flats: Iterable[Flat]) -> None:
        """Have parameters where an update finds them. Raises PlanError for what cannot be followed.

        Flats that nobody may read now (arrivals.py) are left: their update has taken them before, or comes later.
        """
        flats = list(flats)
        free = [flat for flat in flats if flat.trainable and flat.arriving is None]
        found = [slot for flat in free for slot in flat.slots if is_elsewhere(slot)]
        if not found:
            return
        _check(found, {flat.full.untyped_storage().data_ptr() for flat in flats if flat.full is not None})
        with torch.no_grad():
            for slot in found:
                theirs = slot.parameter.data
                home = _home(slot)
                home.copy_(theirs)
                self._theirs[slot.index] = (slot, theirs)
                slot.parameter.data = home

    def has_taken(self, flat: Flat) -> bool:
        """Whether values go back once the flat's are there: nobody may find it waiting after that."""
        return any(slot.flat is flat for slot, _ in self._theirs.values())

    def give_back(self) -> None:
        """A step is over: the new values, from all ranks, to where the script has its parameters."""
        back = [pair for pair in self._theirs.values() if pair[0].flat.arriving is None]
        with torch.no_grad():
            for slot, theirs in back:
                del self._theirs[slot.index]
                slot.parameter.data = theirs.copy_(_home(slot))


def is_elsewhere(slot: Slot) -> bool:
    """Whether a parameter of stage 1 or 2 is no view of its place any more."""
    flat, parameter = slot.flat, slot.parameter
    if flat.full is None or flat.stage not in (1, 2) or slot.start == slot.end:
        return False
    address = flat.full.data_ptr() + slot.start * flat.full.itemsize
    return parameter.data_ptr() != address or parameter.stride() != slot.stride


def _home(slot: Slot) -> torch.Tensor:
    if slot.flat.full is None:
        raise AssertionError("a parameter of stage 1 or 2 has a place in its flat")
    return slot.view(slot.flat.full)


def _check(slots: Sequence[Slot], places: Container[int]) -> None:
    """`places`: addresses of the storages that are parameters' own."""
    ends: dict[int, int] = {}  # of the memory of each storage that has been met, in order of addresses
    for slot in sorted(slots, key=lambda slot: slot.parameter.data_ptr()):
        theirs = slot.parameter.data
        wanted = (slot.shape, slot.flat.script_dtype, slot.flat.device)
        if (theirs.shape, theirs.dtype, theirs.device) != wanted:
            found = f"{tuple(theirs.shape)} in {theirs.dtype} on {theirs.device}"
            raise _refused(slot, f"is {found} now, and was {tuple(wanted[0])} in {wanted[1]} on {wanted[2]}")
        storage = theirs.untyped_storage().data_ptr()
        if storage in places or theirs.data_ptr() < ends.get(storage, 0):
            raise _refused(slot, "shares its memory with another parameter now")
        ends[storage] = theirs.data_ptr() + _extent_bytes(theirs)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From its first element to the end of its last."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.itemsize


def _refused(slot: Slot, what: str) -> PlanError:
    return PlanError(
        f"Since the script has assigned its data, {slot.name!r} {what}, which a plan of ZeRO stage {slot.flat.stage} cannot follow.",
        hint="copy the values into the parameter instead (p.data.copy_), or run without stages.",
    )
