"""Updates of a plan's units one after another, where an optimizer would update all parameters together (foreach).

What such an update allocates is as large as what it updates. A parameter's update looks at no other one, so the script's
optimizer may be asked unit by unit, by its class's own step; the step that the script has called then finds the rest. Which
implementation runs is decided by all parameters of a group, on one GPU or several, with tensors of a class of their own or
without: groups that are not updated together as a whole are left alone, and of the others each unit is updated together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.sharding.sharded_step import FindSlot, is_elementwise
from memadvisor.engines.sharding.unit_step import LabelAs, Optimizer, step_only
from memadvisor.schedule import Schedule

Note = Callable[[str, str], None]


class UpdatesByUnit:
    """Part of a plan in force: all models whose units are updated by themselves. Parameters are held weakly."""

    def __init__(self, slot_of: FindSlot, label: LabelAs, note: Note) -> None:
        self._slot_of = slot_of
        self._label = label
        self._note = note
        self._units: list[tuple[weakref.ref[torch.nn.Parameter], ...]] = []
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Follow a schedule that updates units by themselves, if it does."""
        parameters = {unit.name: unit.parameters for unit in model.units}
        for name in schedule.updated_alone:
            self._units.append(tuple(weakref.ref(parameter) for _, parameter in parameters[name]))

    def clear(self) -> None:
        self._units.clear()

    def applies(self, optimizer: Optimizer) -> bool:
        """Whether some of an optimizer's parameters are updated so; one of which none are is named once."""
        if not self._units:
            return False
        if is_elementwise(optimizer):
            return True  # what of it is updated together, its step looks
        self._tell(optimizer)
        return False

    def _tell(self, optimizer: Optimizer) -> None:
        if optimizer in self._told:
            return
        self._told.add(optimizer)
        self._note(
            "warning",
            f"the plan's update_by_unit has no effect on {type(optimizer).__name__}: only optimizers of torch that update "
            "element by element (SGD, Adam, AdamW and the like), and all parameters together (foreach), gain by it",
        )

    def update(self, optimizer: Optimizer, but: Collection[int]) -> set[int]:
        """Update units, without parameters of the ids `but`; gives the ids of those updated."""
        if not self.applies(optimizer):
            return set()
        together = [group for group in optimizer.param_groups if self._is_together(group)]
        if not together:
            self._tell(optimizer)
        left = {id(parameter) for group in together for parameter in group["params"]} - set(but)
        updated: set[int] = set()
        for parameters in self._units:
            own = {id(p) for each in parameters if (p := each()) is not None and id(p) in left} - updated
            if own:
                step_only(optimizer, own, self._slot_of, self._label)
                updated |= own
        return updated

    def _is_together(self, group: dict[str, Any]) -> bool:
        """Whether torch's optimizers would update all of a group's parameters together."""
        if group.get("fused") or group.get("differentiable"):
            return False
        asked = group.get("foreach")
        if asked is not None:
            return bool(asked)
        _, together = _default_to_fused_or_foreach(list(self._updated(group)), False, use_fused=False)
        return together

    def _updated(self, group: dict[str, Any]) -> Iterator[torch.Tensor]:
        """What stands in the group while the optimizer steps: pieces, of parameters that are updated in pieces."""
        for parameter in group["params"]:
            slot = self._slot_of(parameter)
            if slot is not None and slot.flat.shard is not None:
                yield slot.flat.shard
            elif parameter.grad is not None:
                yield parameter
