"""Optimizer state that lies on another tier between updates, for optimizers that update element by element.

Works on whole parameters (one rank, stage 0), on a rank's pieces (stages 1 to 3) and on DTensors (FSDP2) alike. The
script's own optimizer does each update, by its class's own step, with the groups holding one unit's parameters at a time;
the step that the script has called then finds the rest. That happens when all of the script's own hooks before a step
have run.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memadvisor.coded_states import LEAST_ELEMENTS
from memadvisor.engines.lanes.coded_tier import tables_of
from memadvisor.engines.lanes.tiers import make_tier
from memadvisor.engines.script.live import LiveModel, local_part
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.late import LateTensor
from memadvisor.engines.sharding.sharded_step import FindSlot, Swap, is_elementwise, parameters_of
from memadvisor.engines.updates.cast_updates import update_cast_units
from memadvisor.engines.updates.delayed_updates import DelayedUpdates
from memadvisor.engines.updates.paged_step import (
    Kept,
    Optimizer,
    PagedStep,
    Parameters,
    put_into,
)
from memadvisor.engines.updates.updates_by_unit import UpdatesByUnit
from memadvisor.errors import PlanError
from memadvisor.run.living import living
from memadvisor.schedule import Action, Lane, Point, Schedule
from memadvisor.units import counted, format_bytes, format_seconds

Label = Callable[[torch.Tensor, str, str], None]
Note = Callable[[str, str], None]
_TOLD_STEP = 5  # behind the first one, which makes the state, and the one that is traced as a rule


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """A model's units whose state is put away. Parameters are held weakly: it dies when the script lets go of it."""

    units: dict[str, tuple[weakref.ref[torch.nn.Parameter], ...]]
    actions: tuple[Action, ...]
    tier: Lane
    is_delayed: bool

    def members(self, optimizer: Optimizer) -> dict[str, Parameters]:
        """The optimizer's parameters, by unit, in the order of updates."""
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        found = {
            unit: [p for reference in references if (p := reference()) is not None and id(p) in own]
            for unit, references in self.units.items()
        }
        return {unit: parameters for unit, parameters in found.items() if parameters}


class StateOffload:
    """Part of a plan in force: all models and optimizers whose state is put away. `updated`: as of UpdatesByUnit."""

    def __init__(
        self,
        slot_of: FindSlot,
        label: Label,
        note: Note,
        undo: Undo,
        directory: Path,
        updated: Callable[[Flat], None],
    ) -> None:
        self._slot_of = slot_of
        self._directory = directory
        self._label = label
        self._note = note
        self._models: list[_Model] = []
        self._kept: weakref.WeakKeyDictionary[Optimizer, dict[int, Kept]] = weakref.WeakKeyDictionary()
        self._delayed: weakref.WeakKeyDictionary[Optimizer, dict[int, DelayedUpdates]] = (
            weakref.WeakKeyDictionary()
        )
        self._refused: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._undo = undo
        self._by_unit = UpdatesByUnit(slot_of, label, note, updated)

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Follow a schedule that puts state away, or updates units by themselves. Raises PlanError where the tier is none."""
        self._by_unit.attach(model, schedule)
        away, actions = schedule.offloaded_states, schedule.at(Point.BEFORE_OPTIMIZER)
        if not away:
            return
        # What another model has too is updated with that one, once.
        taken = {id(p()) for other in self._models for unit in other.units.values() for p in unit}
        parameters = {
            unit.name: [p for _, p in unit.parameters if id(p) not in taken]
            for unit in model.units
            if unit.name in away
        }
        on_cpu = any(p.device.type == "cpu" for unit in parameters.values() for p in unit)
        if on_cpu and Lane.HOST in away.values():
            raise PlanError(
                "On a CPU the optimizer's state is in the host's memory already.",
                hint="use --offload-optimizer disk.",
            )
        if schedule.delayed_update and not on_cpu:
            raise PlanError(
                "Delayed updates are done for models on the CPU, and this one is on a GPU.",
                hint="leave out --delayed-update.",
            )
        if not self._models:
            self._patch(schedule.delayed_update)
        for tier in dict.fromkeys(away.values()):
            units = {
                unit: tuple(map(weakref.ref, parameters[unit]))
                for unit in away
                if away[unit] == tier and unit in parameters
            }
            of_tier = tuple(action for action in actions if action.unit in units)
            self._models.append(_Model(units, of_tier, tier, schedule.delayed_update))
        for optimizer in living(torch.optim.Optimizer):
            if "param_groups" in vars(
                optimizer
            ):  # one that wraps another, as accelerate's, has none of its own
                self.put_away(optimizer)  # what has been loaded already, or made with the optimizer

    def applies(self, optimizer: Optimizer) -> bool:
        """Whether some of an optimizer's state is put away, or units are updated by themselves; one whose state must stay is
        named once."""
        return self._puts_away(optimizer) or self._by_unit.applies(optimizer)

    def _puts_away(self, optimizer: Optimizer) -> bool:
        if not any(model.members(optimizer) for model in self._models):
            return False
        if is_elementwise(optimizer):
            return True
        if optimizer not in self._refused:
            self._refused.add(optimizer)
            self._note(
                "warning",
                f"the state of {type(optimizer).__name__} stays in memory: only optimizers of torch that update "
                "element by element (SGD, Adam, AdamW and the like) have it elsewhere, or in 8 bits",
            )
        return False

    def labelled_tensors(self) -> Iterator[tuple[torch.Tensor, str, str]]:
        """Codes of state in the device's memory, and what they are looked up in; what late updates hold: (tensor,
        category, unit)."""
        for late in list(self._delayed.values()):
            for delayed in late.values():
                yield from delayed.labelled_tensors()
        for by_model in list(self._kept.values()):
            for kept in by_model.values():
                yield from ((codes, "optimizer_state", unit) for codes, unit in kept.codes())
                yield from ((table, "other", "") for table in tables_of(kept.tier))

    # ---- the step ----------------------------------------------------------------------------

    def update(self, optimizer: Optimizer) -> Swap:
        """Update what goes unit by unit, when the script's own hooks have run; gives what the groups hold after that.

        That is what is put away, what is cast (cast_updates.py), and what a plan has updated so (updates_by_unit.py)."""
        updated: set[int] = set()
        for number, model in enumerate(self._models):
            members = model.members(optimizer)
            if members:
                if model.is_delayed:
                    self._begin_late(optimizer, number, members)
                else:
                    start_s, step = time.perf_counter(), self._step(optimizer, number, members)
                    step.play(model.actions)
                    self._tell(optimizer, number, step, time.perf_counter() - start_s)
                updated |= {id(parameter) for unit in members.values() for parameter in unit}
        updated |= update_cast_units(optimizer, self._slot_of, self._label, updated)
        updated |= self._by_unit.update(optimizer, updated)
        _order_as_without_us(optimizer)
        rest = {id(parameter) for parameter in parameters_of(optimizer)} - updated
        return Swap(optimizer, self._slot_of, only=rest, label=self._label)

    def _begin_late(self, optimizer: Optimizer, number: int, members: dict[str, Parameters]) -> None:
        """Have the update of the step before in the parameters, and begin this one's."""
        delayed = self._delayed.setdefault(optimizer, {}).setdefault(number, DelayedUpdates())
        delayed.settle()
        kept = self._kept_of(optimizer, number, members)
        kept.num_steps += 1
        if kept.num_steps == _TOLD_STEP:
            waited = format_seconds(delayed.waited_s)
            self._note("info", f"step {kept.num_steps} waited {waited} for the update of the step before it")
        label = partial(_label_state, self._label)
        delayed.begin(optimizer, members, kept, self._models[number].actions, label, self._label)

    def settle(self) -> None:
        """Have all updates that are under way in the parameters."""
        for by_model in list(self._delayed.values()):
            for delayed in by_model.values():
                delayed.settle()

    def _tell(self, optimizer: Optimizer, number: int, step: PagedStep, duration_s: float) -> None:
        """Say once what a step has moved, and how long it has waited for that."""
        kept = self._kept[optimizer][number]
        kept.num_steps += 1
        if kept.num_steps == _TOLD_STEP and not kept.has_failed:
            size_bytes = sum(parcel.size_bytes for parcel in kept.parcels.values())
            state = f"{format_bytes(size_bytes)} of optimizer state of {counted(len(kept.parcels), 'unit')}"
            took = f"took {format_seconds(duration_s)}, {format_seconds(step.waited_s)} of it"
            is_coded = self._models[number].tier is Lane.COMPUTE
            if is_coded and not kept.parcels:
                self._note(
                    "warning",
                    f"the plan's optimizer_bits has no effect: {type(optimizer).__name__} keeps nothing of parameters of "
                    f"{LEAST_ELEMENTS} elements and more that may be coded",
                )
                return
            if is_coded:
                coded_bytes = sum(codes.nbytes for codes, _ in kept.codes())
                text = f"{state} in 8 bits, {format_bytes(coded_bytes)}: the update in step {kept.num_steps} {took} coding"
            else:
                moved = f"moved {format_bytes(step.moved_bytes)}"
                text = (
                    f"{state} on {self._models[number].tier}: the update in step {kept.num_steps} {moved} and {took} "
                    "waiting for transfers"
                )
            self._note("info", text)

    def _kept_of(self, optimizer: Optimizer, number: int, members: dict[str, Parameters]) -> Kept:
        by_model = self._kept.setdefault(optimizer, {})
        if number not in by_model:
            device = next(iter(members.values()))[0].device
            tier = make_tier(self._models[number].tier, device, self._directory, self._note)
            kept = by_model[number] = Kept(tier, lambda error: None)
            for table in tables_of(tier):
                self._label(table, "other", "")
            kept.failed = partial(_keep_in_memory, weakref.ref(kept), self._note)
        return by_model[number]

    def _step(self, optimizer: Optimizer, number: int, members: dict[str, Parameters]) -> PagedStep:
        kept, label = self._kept_of(optimizer, number, members), partial(_label_state, self._label)
        return PagedStep(optimizer, members, kept, self._slot_of, label, self._label)

    # ---- between steps -----------------------------------------------------------------------

    def put_away(self, optimizer: Optimizer) -> None:
        """Put away what stands in memory."""
        if not self._puts_away(optimizer):
            return
        for number, model in enumerate(self._models):
            members = model.members(optimizer)
            if members:
                step = self._step(optimizer, number, members)
                for unit in members:
                    step.put_away(unit)
                step.finish()

    def bring_back(self) -> None:
        """The engine is taken off: all state is in memory again. What cannot be read stays late, and fails when read."""
        self.settle()
        lost: OSError | None = None
        for optimizer in list(self._kept):
            for state in optimizer.state.values():
                for key, value in state.items() if isinstance(state, dict) else ():
                    if type(late := local_part(value)) is LateTensor:
                        try:
                            put_into(state, key, late.source.values())
                        except OSError as error:
                            lost = error
        if lost is not None:
            text = f"optimizer state cannot be read back from disk: {lost.strerror or lost}"
            self._note("warning", text)
        self._kept.clear()
        self._models.clear()
        self._by_unit.clear()

    def _patch(self, is_delayed: bool) -> None:
        if is_delayed:
            for kind in (torch.optim.Optimizer, torch.nn.Module):
                self._undo.replace(kind, "state_dict", self._settled_first(kind.state_dict))
        original = torch.optim.Optimizer.load_state_dict

        def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            self.settle()
            original(optimizer, state_dict)
            self.put_away(optimizer)

        self._undo.replace(torch.optim.Optimizer, "load_state_dict", load_state_dict)

    def _settled_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        this = weakref.ref(self)

        @functools.wraps(original)
        def state_dict(of: Any, *args: Any, **kwargs: Any) -> Any:
            if (offload := this()) is not None:
                offload.settle()
            return original(of, *args, **kwargs)

        return state_dict


def _label_state(label: Label, tensor: torch.Tensor, unit: str) -> None:
    label(tensor, "optimizer_state", unit)


def _keep_in_memory(kept: weakref.ref[Kept], note: Note, error: OSError) -> None:
    found = kept()
    if found is not None and not found.has_failed:
        found.has_failed = True
        note(
            "warning",
            f"optimizer state cannot be written to disk ({error.strerror or error}): it stays in memory from here on, "
            "and results are right",
        )


def _order_as_without_us(optimizer: Optimizer) -> None:
    """State in the order of the groups, in which the optimizer itself would have made it."""
    places = {id(parameter): place for place, parameter in enumerate(parameters_of(optimizer))}
    order = [places.get(id(parameter), -1) for parameter in optimizer.state]
    if all(a <= b for a, b in itertools.pairwise(order)):
        return
    items = sorted(optimizer.state.items(), key=lambda item: places.get(id(item[0]), -1))
    optimizer.state.clear()
    optimizer.state.update(items)
