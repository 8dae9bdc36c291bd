"""Updates of masters by gradients as narrow as the parameters, which stage 1 has: one unit's are cast at a time.

The script's optimizer updates element by element, so it may be asked unit by unit, by its class's own step; the step that
the script has called then finds the rest. What is cast goes when its unit is updated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from memadvisor.engines.sharding.flat import Slot
from memadvisor.engines.sharding.sharded_step import FindSlot, parameters_of
from memadvisor.engines.sharding.unit_step import LabelAs, Optimizer, step_only


def is_cast(slot: Slot) -> bool:
    """Whether a parameter's gradient is narrower than what the optimizer updates."""
    return slot.flat.has_masters_beside and slot.flat.stage < 2


def update_cast_units(
    optimizer: Optimizer, slot_of: FindSlot, label: LabelAs, but: Collection[int]
) -> set[int]:
    """Update parameters whose gradients are cast, `but` those of these ids; gives the ids of those updated."""
    units: dict[str, set[int]] = {}
    for parameter in parameters_of(optimizer):
        slot = slot_of(parameter)
        if slot is not None and is_cast(slot) and id(parameter) not in but:
            units.setdefault(slot.flat.unit, set()).add(id(parameter))
    for members in units.values():
        step_only(optimizer, members, slot_of, label)
    return set().union(*units.values())


def are_cast(slots: Iterable[Slot]) -> bool:
    """Whether any of an optimizer's are."""
    return any(is_cast(slot) for slot in slots)
