"""One unit's part of an optimizer step, done by the script's own optimizer; and the options that it is done with."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from memadvisor.engines.sharding.flat import Slot, UnitState
from memadvisor.engines.sharding.sharded_step import FindSlot, Swap

Optimizer = torch.optim.Optimizer
Options = list[dict[str, Any]]
LabelAs = Callable[[torch.Tensor, str, str], None]  # tensor, category, unit


def step_unit(optimizer: Optimizer, unit: UnitState) -> None:
    """Update this rank's pieces of a unit with its reduced gradients, which are free then.

    The optimizer updates elements one by one. Its other parameters, the script's hooks on its step and whatever
    wraps that are left alone.
    """
    slots = {id(slot.parameter): slot for flat in unit.trainable for slot in flat.slots}
    swap = Swap(
        optimizer, lambda parameter: slots.get(id(parameter)), only=slots.keys(), gradient_of=_reduced_piece
    )
    _step_swapped(optimizer, swap)
    for flat in unit.trainable:
        flat.grad_shard = None
        flat.round_masters()
        if flat.stage < 3:
            # Autograd then refuses to go on with what it has saved of the old values.
            torch.autograd.graph.increment_version([slot.parameter for slot in flat.slots])


def _reduced_piece(slot: Slot) -> torch.Tensor | None:
    return None if slot.flat.grad_shard is None else slot.piece(slot.flat.grad_shard)


def step_only(optimizer: Optimizer, only: Container[int], slot_of: FindSlot, label: LabelAs) -> None:
    """Update the parameters of these ids, and no others."""
    _step_swapped(optimizer, Swap(optimizer, slot_of, only=only, label=label))


def _step_swapped(optimizer: Optimizer, swap: Swap) -> None:
    """The class's own step on what `swap` has put into its groups, without the hooks that tell of a step of the script."""
    step = type(optimizer).step
    plain: Any = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]  # wraps
    try:
        plain(optimizer)
    finally:
        swap.undo()


def options_of(optimizer: Optimizer) -> Options:
    """What an update depends on beside values, gradients and state, by parameter group."""
    return [
        {
            # A device's numbers are not read, which would wait for it.
            key: (id(value), value._version) if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def changed_option(before: Options | None, after: Options) -> str | None:
    """The name of an option that differs; None where none does."""
    if before is None or len(before) != len(after):
        return "param_groups"
    for old, new in zip(before, after, strict=True):
        for key in old.keys() | new.keys():
            if key not in old or key not in new or old[key] != new[key]:
                return key
    return None
