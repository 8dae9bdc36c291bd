"""Updates of a plan's units one after another, where an optimizer would update all parameters together (foreach), or what
is updated travels under the updates of others.

What an update of all parameters allocates is as large as what it updates. A parameter's update looks at no other one, so the
script's optimizer may be asked unit by unit, by its class's own step; the step that the script has called then finds the
rest. Which implementation runs is decided by all parameters of a group, on one GPU or several, with tensors of a class of
their own or without: groups of which a unit alone might be updated otherwise are left alone. Those that are not updated
together gain nothing by it, but where a unit's values begin to go to the other ranks behind its update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.sharded_step import FindSlot, is_elementwise
from memadvisor.engines.sharding.unit_step import LabelAs, Optimizer, step_only
from memadvisor.schedule import Schedule

Note = Callable[[str, str], None]


class _Unit(NamedTuple):
    parameters: tuple[weakref.ref[torch.nn.Parameter], ...]
    is_gathered: bool  # behind its update


class UpdatesByUnit:
    """Part of a plan in force: all models whose units are updated by themselves. Parameters are held weakly.

    updated: is told of each flat that all of has been updated, and may be gathered.
    """

    def __init__(
        self, slot_of: FindSlot, label: LabelAs, note: Note, updated: Callable[[Flat], None]
    ) -> None:
        self._slot_of = slot_of
        self._label = label
        self._note = note
        self._updated_flat = updated
        self._units: list[_Unit] = []
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Follow a schedule that updates units by themselves, if it does."""
        parameters = {unit.name: unit.parameters for unit in model.units}
        gathered = schedule.gathered_behind_updates
        for name in schedule.updated_alone:
            own = tuple(weakref.ref(parameter) for _, parameter in parameters[name])
            self._units.append(_Unit(own, name in gathered))

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
            "element by element (SGD, Adam, AdamW and the like) gain by it, where they update all parameters together "
            "(foreach), or stages 1 and 2 gather what is updated under what follows",
        )

    def update(self, optimizer: Optimizer, but: Collection[int]) -> set[int]:
        """Update units, without parameters of the ids `but`; gives the ids of those updated."""
        if not self.applies(optimizer):
            return set()
        together, apart = self._left(optimizer, set(but))
        updated: set[int] = set()
        for unit in self._units:
            left = together | apart if unit.is_gathered else together
            own = {id(p) for each in unit.parameters if (p := each()) is not None and id(p) in left} - updated
            if own:
                step_only(optimizer, own, self._slot_of, self._label)
                updated |= own
                if unit.is_gathered:
                    self._gather(unit, updated)
        if not updated:
            self._tell(optimizer)
        return updated

    def _gather(self, unit: _Unit, updated: Collection[int]) -> None:
        slots = [slot for each in unit.parameters if (p := each()) is not None and (slot := self._slot_of(p))]
        for flat in {id(slot.flat): slot.flat for slot in slots}.values():
            if all(id(slot.parameter) in updated for slot in flat.slots):
                self._updated_flat(flat)

    def _left(self, optimizer: Optimizer, but: set[int]) -> tuple[set[int], set[int]]:
        """Ids of parameters that are updated together, and of those that may be updated apart from each other as they are."""
        together: set[int] = set()
        apart: set[int] = set()
        for group in optimizer.param_groups:
            if self._is_together(group):
                together.update(map(id, group["params"]))
            elif any(unit.is_gathered for unit in self._units) and self._may_be_apart(group):
                apart.update(map(id, group["params"]))
        return together - but, apart - but

    def _is_together(self, group: dict[str, Any]) -> bool:
        """Whether torch's optimizers would update all of a group's parameters together."""
        if group.get("fused") or group.get("differentiable"):
            return False
        asked = group.get("foreach")
        if asked is not None:
            return bool(asked)
        _, together = _default_to_fused_or_foreach(list(self._updated(group)), False, use_fused=False)
        return together

    def _may_be_apart(self, group: dict[str, Any]) -> bool:
        """Whether a group that is not updated together is updated as it is by any of its parameters alone."""
        if group.get("differentiable"):
            return False
        is_asked = bool(group.get("fused")) or group.get("foreach") is not None
        return is_asked or all(tensor.device.type == "cpu" for tensor in self._updated(group))

    def _updated(self, group: dict[str, Any]) -> Iterator[torch.Tensor]:
        """What stands in the group while the optimizer steps: pieces, of parameters that are updated in pieces."""
        for parameter in group["params"]:
            slot = self._slot_of(parameter)
            if slot is not None and slot.flat.shard is not None:
                yield slot.flat.shard
            elif parameter.grad is not None:
                yield parameter
