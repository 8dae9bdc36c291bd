"""Units whose saved tensors are on another tier from the end of their forward until their backward.

Plays the OFFLOAD and PREFETCH actions of a schedule. As with recomputation the forward of a unit's class is wrapped, not
the module. A unit that runs again keeps its inputs, and outputs of some operators: recompute.py hands these to the call
that is running (`call_of`). A backward is announced by the gradients of the unit's outputs. What the schedule has not
brought back when autograd asks for it, as where the script's order is another than the plan's, comes at once; so results
hang on the schedule in nothing.

A call of a unit remembers the calls before it that the schedule has brought back at its own backward: of several
micro-batches under way each finds its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memadvisor.engines.activations.saved_activations import Kept, KeptByStorage, SavedActivations, stays
from memadvisor.engines.activations.unit_forwards import UnitForwards, is_to_be_saved, obstacles
from memadvisor.engines.lanes.tiers import Tier, make_tier
from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.undo import Undo
from memadvisor.errors import PlanError
from memadvisor.schedule import Action, ActionKind, Lane, Point, Schedule

Label = Callable[[torch.Tensor, str, str], None]
Note = Callable[[str, str], None]


class Call:
    """One call of a unit's forward: what is kept for it, and the calls that are brought back at its backward."""

    def __init__(self, offload: OffloadedActivations, plays: _Plays, unit: str) -> None:
        self.offload = weakref.ref(offload)
        self.plays = plays
        self.unit = unit
        self.kept: list[weakref.ref[Kept]] = []  # autograd's places hold it, and this call
        self.before = {name: call for name in plays.fetched_at(unit) if (call := plays.latest.get(name))}

    def found(self, tensor: torch.Tensor) -> Kept:
        kept, is_new = self.plays.kept.of(tensor.untyped_storage(), tensor._version)
        if is_new or all(reference() is not kept for reference in self.kept):
            self.kept.append(weakref.ref(kept))
        return kept

    def alive(self) -> Iterator[Kept]:
        for reference in self.kept:
            if (kept := reference()) is not None:
                yield kept

    def fetch(self) -> None:
        """Begin to bring back all that is away, what the forward made last first: the backward asks for it first."""
        for kept in [*self.alive()][::-1]:
            kept.fetch(functools.partial(self.plays.label, unit=self.unit))

    def brings(self, kept: Kept) -> None:
        """Autograd asks for a place of this call."""
        offload = self.offload()
        if kept.is_away and offload is not None:
            offload.is_late(self.unit)
        kept.fetch(functools.partial(self.plays.label, unit=self.unit))


@dataclass(eq=False)
class _Plays:
    """One model and its schedule; `latest` is the last call of each unit."""

    schedule: Schedule
    script_label: Label
    kept: KeptByStorage = field(default_factory=KeptByStorage)
    latest: dict[str, weakref.ref[Call]] = field(default_factory=dict)
    under_way: dict[str, Call] = field(default_factory=dict)  # sent, and not settled

    def label(self, tensor: torch.Tensor, unit: str) -> None:
        self.script_label(tensor, "activation", unit)

    def at(self, point: Point, unit: str) -> Iterator[Action]:
        for action in self.schedule.at(point, unit):
            if action.kind in (ActionKind.OFFLOAD, ActionKind.PREFETCH):
                yield action

    def fetched_at(self, unit: str) -> list[str]:
        return [action.unit for action in self.at(Point.BEFORE_BACKWARD, unit) if action.unit != unit]

    def has_actions(self, unit: str) -> bool:
        return any(any(self.at(point, unit)) for point in (Point.AFTER_FORWARD, Point.BEFORE_BACKWARD))


class OffloadedActivations:
    """All units of a process that have something to play. Modules are held weakly."""

    needs_units = False

    def __init__(self, hooks: Hooks, label: Label, note: Note, undo: Undo, directory: Path) -> None:
        self._hooks = hooks
        self._label = label
        self._note = note
        self._undo = undo
        self._directory = directory
        self._units: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, _Plays]] = (
            weakref.WeakKeyDictionary()
        )
        self._plays: list[_Plays] = []
        self._running: weakref.WeakKeyDictionary[torch.nn.Module, Call] = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakKeyDictionary[torch.nn.Module, Lane] = weakref.WeakKeyDictionary()
        self._tiers: dict[tuple[Lane, torch.device], Tier] = {}
        self._forwards = UnitForwards(self, undo)
        self._has_failed = self._was_late = False
        self._noted: set[str] = set()
        undo.add(self._units.clear)
        undo.add(self.backward_begins)  # nothing stays under way

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Play the OFFLOAD and PREFETCH actions of a schedule on a model. Raises PlanError."""
        moved = {
            unit.name: Lane(unit.activation_tier)
            for unit in schedule.units
            if unit.activation_tier != "device"
        }
        if not moved:
            return
        if not self._plays:
            self._hooks.observe(self, set())
        plays = _Plays(schedule, self._label)
        self._plays.append(plays)
        alone = obstacles(model)
        for unit in model.units:
            if not plays.has_actions(unit.name):
                continue
            if unit.name in alone:
                self._leave_alone(unit.name, alone[unit.name])
            else:
                self._units[unit.module] = (unit.name, plays)
                if (tier := moved.get(unit.name)) is not None:
                    self._check_tier(tier, unit.module)
                    self._moved[unit.module] = tier
                self._forwards.wrap(unit.module)

    def _check_tier(self, tier: Lane, module: torch.nn.Module) -> None:
        """Raise PlanError where a tier is no other than the device itself, or nothing can be put there."""
        device = next(module.parameters()).device
        if tier is Lane.HOST and device.type == "cpu":
            raise PlanError(
                "The plan offloads activations to the host's memory, and the model is on the CPU: it is the same memory.",
                hint="offload them to disk (--offload-activations disk).",
            )
        self._tier(tier, device)

    def _tier(self, lane: Lane, device: torch.device) -> Tier:
        if (lane, device) not in self._tiers:
            self._tiers[lane, device] = make_tier(lane, device, self._directory, self._note)
        return self._tiers[lane, device]

    def _leave_alone(self, unit: str, reason: str) -> None:
        self._note_once(f"what unit {unit!r} keeps is not offloaded: {reason}")

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note("warning", text)

    # ---- forward -----------------------------------------------------------------------------

    def applies(self, module: torch.nn.Module) -> bool:
        return module in self._units and is_to_be_saved(self._hooks, "offloaded")

    def run(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        unit, plays = self._units[module]
        call = Call(self, plays, unit)
        autograd: Any = torch._C._autograd
        if module in self._moved and autograd._saved_tensors_hooks_is_enabled():
            self._running[module] = call
            try:
                with SavedActivations(call, stays(module, (args, kwargs))):
                    output = original(module, *args, **kwargs)
            finally:
                del self._running[module]
        else:
            output = original(module, *args, **kwargs)
        plays.latest[unit] = weakref.ref(call)
        self._announce_backward(call, output)
        for action in plays.at(Point.AFTER_FORWARD, unit):
            if action.overlaps:
                self._send(call, module)
            else:
                self._settle(plays, action.unit)
        return output

    def call_of(self, module: torch.nn.Module) -> Call | None:
        """The call of a unit that is running now, if what it keeps is moved."""
        return self._running.get(module)

    def _announce_backward(self, call: Call, output: Any) -> None:
        this = weakref.ref(self)

        def announced(gradient: torch.Tensor) -> None:
            offload = this()
            if offload is not None and offload._hooks.in_backward:
                offload._backward_begins(call)

        leaves: list[Any] = tree_leaves(output)
        for leaf in leaves:
            if issubclass(type(leaf), torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(announced)

    def _send(self, call: Call, module: torch.nn.Module) -> None:
        self._settle(call.plays, call.unit)  # of an earlier call: one of each unit is under way at most
        if self._has_failed:
            return
        call.plays.under_way[call.unit] = call
        for kept in call.alive():
            try:
                kept.send(self._tier(self._moved[module], kept.device))
            except OSError as error:
                self._failed(error)

    def _settle(self, plays: _Plays, unit: str) -> None:
        call = plays.under_way.pop(unit, None)
        for kept in call.alive() if call is not None else ():
            try:
                kept.settle()
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._has_failed = True
        self._note_once(
            f"activations stay in memory from here on: they cannot be written to disk ({error.strerror})"
        )

    # ---- backward ----------------------------------------------------------------------------

    def _backward_begins(self, call: Call) -> None:
        for action in call.plays.at(Point.BEFORE_BACKWARD, call.unit):
            target = call if action.unit == call.unit else call.before.get(action.unit, _nothing)()
            if target is not None:
                target.fetch()

    def is_late(self, unit: str) -> None:
        """A unit's backward has begun without notice, or what it keeps was never brought back ahead."""
        if self._was_late:
            return
        self._was_late = True
        self._note_once(
            f"what unit {unit!r} keeps is brought back from its tier when it is asked for, and not ahead: the script does "
            "not run its units in the order of the plan. So it may be with others"
        )

    def backward_begins(self) -> None:
        for plays in self._plays:
            for unit in list(plays.under_way):
                self._settle(plays, unit)

    def backward_ends(self, failed: bool) -> None: ...

    def enter_module(self, module: torch.nn.Module) -> None: ...

    def leave_module(self, module: torch.nn.Module, output: Any) -> None: ...


def _nothing() -> None:
    return None
