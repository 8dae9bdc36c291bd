"""Units whose forward keeps nothing but its inputs, and runs again in the backward.

The first run is the script's own call (unit_forwards.py). second_run.py does the work, with the random state and autocast
of the first run; buffers and attributes that a forward changes are put back for it (changing_state.py). Stretches of
several units are stretches.py's; one whose units the script does not call one after the other, each with what the one
before it returned, is left to its units, each by itself.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memadvisor.cost.stretches import Stretches
from memadvisor.engines.activations.caches import EmptyCaches, with_caches_as_they_were
from memadvisor.engines.activations.changing_state import ChangingState, State, WithState
from memadvisor.engines.activations.inner_hooks import FiringOnce, InnerHooks
from memadvisor.engines.activations.kept import KeptOutputs
from memadvisor.engines.activations.kept_calls import KeptCalls
from memadvisor.engines.activations.offloaded_activations import OffloadedActivations
from memadvisor.engines.activations.parts import Parts
from memadvisor.engines.activations.second_run import Around, run_keeping_arguments
from memadvisor.engines.activations.stretches import Pass
from memadvisor.engines.activations.unit_forwards import UnitForwards, obstacles
from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.saved import is_in_checkpoint
from memadvisor.schedule import Schedule
from memadvisor.stretches import Stretch

Note = Callable[[str, str], None]
Label = Callable[[torch.Tensor, str, str], None]
Watch = Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]]


class Recompute:
    """All recomputed units of a process. Modules are held weakly.

    `movers`: who takes what a call of a module keeps out of memory meanwhile, if anybody does. `watch`: what a unit's
    second run is done inside.
    """

    def __init__(
        self,
        hooks: Hooks,
        label: Label,
        note: Note,
        undo: Undo,
        movers: OffloadedActivations,
    ) -> None:
        self.watch: Watch = lambda module: contextlib.nullcontext()
        self._hooks = hooks
        self._movers = movers
        self._label = label
        self._note = note
        self._undo = undo
        self._units: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._state = ChangingState()
        self._caches = EmptyCaches()
        self._inner_hooks = InnerHooks()
        self._noted: set[tuple[str, str]] = set()
        self._forwards = UnitForwards(self, undo)
        self._stretch_of: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Stretches, Stretch]] = (
            weakref.WeakKeyDictionary()
        )
        self._kept: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
        self._kept_calls = KeptCalls(hooks)
        self._parts = Parts(hooks, self._label_kept, note, undo, self._state)
        self._broken: set[Stretch] = set()
        self._passes: dict[Stretch, Pass] = {}  # those that are under way
        undo.add(self._units.clear)
        undo.add(self._passes.clear)

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Play the RECOMPUTE actions of a schedule on a model."""
        stretches, kept, alone = Stretches(schedule.stretches), schedule.kept, obstacles(model)
        for unit in model.units:
            if unit.name not in stretches:
                continue
            if unit.name in alone:
                self._leave_alone(unit.name, alone[unit.name])
            else:
                self._units[unit.module] = unit.name
                if unit.name in kept:
                    self._kept[unit.module] = frozenset(kept[unit.name])
                self._stretch_of[unit.module] = (stretches, stretches.around(unit.name)[0])
                self._kept_calls.attach(unit.module, schedule.kept_calls.get(unit.name, ()))
                self._forwards.wrap(unit.module)
        self._parts.attach(model, schedule)

    def _leave_alone(self, unit: str, reason: str) -> None:
        if (unit, reason) not in self._noted:
            self._noted.add((unit, reason))
            self._note("warning", f"unit {unit!r} is not recomputed: {reason}")

    def applies(self, module: torch.nn.Module) -> bool:
        if module not in self._units or not torch.is_grad_enabled() or self._hooks.in_backward:
            return False
        if is_in_checkpoint():
            self._leave_alone(self._units[module], "the script checkpoints it already")
            return False
        return not self._kept_calls.keeps_next(module)

    def run(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        args, kwargs = self._caches.leave_out(module, args, kwargs)
        before = self._state.before(module)
        plain = functools.partial(original, module)
        forward, args, kwargs = with_caches_as_they_were(module, plain, args, kwargs)
        firing = self._inner_hooks.of(module)
        around = functools.partial(self._again, module, before, firing)
        current = self._pass_with(module)
        if current is not None:
            output = self._call_in(current, forward, args, kwargs, around, firing)
        else:
            unit, holder = self._units[module], self._movers.call_of(module)
            kept = self._outputs_kept(module)
            output = run_keeping_arguments(
                unit,
                forward,
                args,
                kwargs,
                around,
                kept,
                self._label_kept,
                holder,
                functools.partial(self._parts.within, unit),
                firing,
            )
        self._state.learn(module, before)
        return output

    @contextlib.contextmanager
    def _again(self, module: torch.nn.Module, before: State, firing: FiringOnce | None) -> Iterator[None]:
        """What a second run is done inside."""
        hooks = contextlib.nullcontext() if firing is None else firing.second_run()
        with WithState(before), self.watch(module), hooks:
            yield

    def _label_kept(self, tensor: torch.Tensor) -> None:
        self._label(tensor, "activation", "")

    def _outputs_kept(self, module: torch.nn.Module) -> KeptOutputs | None:
        names, unit = self._kept.get(module, ()), self._units[module]
        if not names:
            return None
        label = self._label
        return KeptOutputs(
            names,
            functools.partial(self._miss, unit),
            lambda tensor: label(tensor, "activation", unit),
        )

    def _miss(self, unit: str, names: set[str]) -> None:
        reason = "its forward does not call all operators whose outputs the plan keeps"
        if (unit, reason) not in self._noted:
            self._noted.add((unit, reason))
            self._note("warning", f"unit {unit!r} keeps less than planned: {reason} ({min(names)})")

    def _pass_with(self, module: torch.nn.Module) -> Pass | None:
        """The pass through a stretch of several units in which this one comes next; None where it runs alone."""
        unit = self._units[module]
        stretches, stretch = self._stretch_of[module]
        if len(stretch) == 1 or stretch in self._broken:
            return None
        if unit == stretch[0]:
            hooks = self._hooks
            self._close(stretch)  # one that an exception has cut short
            self._passes[stretch] = Pass(stretches, stretch, lambda: hooks.in_backward, self._label_kept)
        current = self._passes.get(stretch)
        if current is None or current.expected != unit:
            self._break(stretch, f"the script does not call {unit!r} in its turn")
            return None
        return current

    def _call_in(
        self,
        current: Pass,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        around: Around,
        firing: FiringOnce | None,
    ) -> Any:
        unit, stretch = current.expected, current.stretch
        output, is_linked = current.call(forward, args, kwargs, around, firing)
        if not is_linked and unit != stretch[0]:
            self._break(stretch, f"{unit!r} does not take what the unit before it returns")
        elif current.expected is None:
            self._close(stretch)
        return output

    def _close(self, stretch: Stretch) -> None:
        current = self._passes.pop(stretch, None)
        if current is not None:
            current.close()

    def _break(self, stretch: Stretch, reason: str) -> None:
        """From now on each unit of the stretch is recomputed by itself."""
        self._close(stretch)
        if stretch not in self._broken:
            self._broken.add(stretch)
            self._note(
                "warning",
                f"units {stretch[0]!r} to {stretch[-1]!r} are recomputed one by one, not as one stretch: {reason}",
            )
