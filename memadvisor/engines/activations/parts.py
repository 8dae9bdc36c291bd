"""Parts of a unit that keep nothing but what they are called with, and run again before their own backward.

A part is a module inside a unit, or several that follow each other, each called with no other tensor than the one before
it has returned. Parts of a unit that is recomputed are taken apart in its second run (nested recomputation): what autograd
would keep of a part is put off, and made by a third run when it is asked for. Parts of a unit that is not recomputed run
again for the first time then. Where the script does not call a part's modules so, those up to there alone run again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memadvisor.engines.activations.caches import EmptyCaches, with_caches_as_they_were
from memadvisor.engines.activations.changing_state import ChangingState, State, WithState
from memadvisor.engines.activations.inner_hooks import FiringOnce, InnerHooks
from memadvisor.engines.activations.second_run import (
    Around,
    Conditions,
    Filling,
    Place,
    Places,
    Returned,
    Told,
    as_packed,
    check_versions,
    each_once,
    is_walked_again,
    kept_of,
    until_enough,
    value_of,
    versions_of,
)
from memadvisor.engines.activations.unit_forwards import UnitForwards
from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.gathers import Gathers
from memadvisor.engines.sharding.saved import innermost_gathers, is_in_checkpoint, parameters_apart
from memadvisor.run.own_forwards import why_not_wrapped
from memadvisor.schedule import Schedule

Note = Callable[[str, str], None]
_UNCHANGING = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Parts:
    """The parts of all units of a process. Modules are held weakly."""

    def __init__(self, hooks: Hooks, told: Told, note: Note, undo: Undo, state: ChangingState) -> None:
        self._hooks = hooks
        self._told = told
        self._note = note
        self._undo = undo
        self._state = state
        self._caches = EmptyCaches()
        self._inner_hooks = InnerHooks()
        self._forwards = UnitForwards(self, undo)
        self._place_of: weakref.WeakKeyDictionary[torch.nn.Module, _PlaceInUnit] = weakref.WeakKeyDictionary()
        self._open: dict[tuple[str, ...], _Part] = {}  # whose next module is still to be called
        self._noted: set[tuple[str, ...]] = set()
        self._running = threading.local()  # the unit that runs a second time, and what it fills
        undo.add(self._place_of.clear)
        undo.add(self._open.clear)

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Parts of units that run again, or run once, by themselves."""
        for unit in model.units:
            recomputed = any(unit.name in stretch for stretch in schedule.stretches)
            for part in schedule.parts.get(unit.name, ()):
                found = (_inside(unit.module, unit.name, name) for name in part)
                modules = [module for module in found if module is not None]
                if len(modules) < len(part) or any(map(why_not_wrapped, part, modules)):
                    self._tell(
                        part,
                        "does not run again: the model has no such modules, or replaced or compiled forwards",
                    )
                    continue
                for number, module in enumerate(modules):
                    self._place_of[module] = _PlaceInUnit(unit.name, recomputed, part, number)
                    self._forwards.wrap(module)

    @contextlib.contextmanager
    def within(self, unit: str, filling: Filling) -> Iterator[None]:
        """A second run of a unit."""
        before = getattr(self._running, "unit", None)
        self._running.unit = unit, filling
        try:
            yield
        finally:
            self._running.unit = before
            self._open.clear()  # what the last tensor has cut short

    def applies(self, module: torch.nn.Module) -> bool:
        place = self._place_of.get(module)
        if place is None or not torch.is_grad_enabled() or is_in_checkpoint():
            return False
        running = getattr(self._running, "unit", None)
        if place.is_recomputed:
            return running is not None and running[0] == place.unit
        return running is None and not self._hooks.in_backward

    def run(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        place = self._place_of[module]
        args, kwargs = self._caches.leave_out(module, args, kwargs)
        part = self._open.pop(place.part, None)
        if place.number and (part is None or not part.continues(place.number, args, kwargs)):
            self._tell(place.part, "keeps more than planned: the script does not call it in one go")
            return original(module, *args, **kwargs)
        plain = functools.partial(original, module)
        forward, args, kwargs = with_caches_as_they_were(module, plain, args, kwargs)
        if part is None or not place.number:
            running = getattr(self._running, "unit", None)
            part = _Part(place, args, kwargs, self._told, None if running is None else running[1])
        before = self._state.before(module)
        firing = self._inner_hooks.of(module)
        output = part.call(forward, functools.partial(_again, before, firing), args, kwargs, firing)
        self._state.learn(module, before)
        if place.number + 1 < len(place.part):
            self._open[place.part] = part
        return output

    def _tell(self, part: tuple[str, ...], what: str) -> None:
        if part not in self._noted:
            self._noted.add(part)
            self._note(
                "warning", f"a part of a unit, {' to '.join(dict.fromkeys((part[0], part[-1])))}, {what}"
            )


@contextlib.contextmanager
def _again(before: State, firing: FiringOnce | None) -> Iterator[None]:
    """What a module of a part runs again inside."""
    with WithState(before), contextlib.nullcontext() if firing is None else firing.second_run():
        yield


class _PlaceInUnit:
    """Of a module: its unit, whether that is recomputed, its part, and its place there."""

    __slots__ = ("is_recomputed", "number", "part", "unit")

    def __init__(self, unit: str, is_recomputed: bool, part: tuple[str, ...], number: int) -> None:
        self.unit = unit
        self.is_recomputed = is_recomputed
        self.part = part
        self.number = number


class _Part:
    """A pass through a part. The hooks that autograd holds, or the places of its unit, are all that holds it."""

    def __init__(
        self, place: _PlaceInUnit, args: Any, kwargs: Any, told: Told, filling: Filling | None
    ) -> None:
        self._unit = place.unit
        leaves, self._spec = tree_flatten((args, kwargs))
        self._leaves = each_once(lambda leaf: kept_of(leaf, told), leaves)
        self._versions = versions_of(self._leaves)
        self._calls: list[_Call] = []
        self._has_run = False
        self._places = Places()
        self._filling = filling
        self._number = place.number
        self._returned: Returned | None = None

    def continues(self, number: int, args: Any, kwargs: Any) -> bool:
        """Whether a call is the part's next, with no other tensor than the last one has returned, unchanged."""
        if self._returned is None or number != self._number:
            return False
        tensor = _Given(args, kwargs).only_tensor(args, kwargs)
        return tensor is not None and self._returned.is_unchanged(tensor)

    def call(
        self,
        forward: Callable[..., Any],
        around: Around,
        args: Any,
        kwargs: Any,
        firing: FiringOnce | None = None,
    ) -> Any:
        conditions = Conditions(tree_flatten((args, kwargs))[0])
        # In the first run of a recomputed unit, where there are no parts, parameters of stage 3 are places in their storage.
        sharded = innermost_gathers()
        self._calls.append(_Call(forward, around, conditions, _Given(args, kwargs), sharded))
        watched = firing.first_run(self._places.__len__) if firing is not None else contextlib.nullcontext()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self.unpack)
        with hooks, parameters_apart(sharded), watched:
            output = forward(*args, **kwargs)
        self._number += 1
        self._returned = Returned(0, output) if isinstance(output, torch.Tensor) else None
        return output

    def _pack(self, tensor: torch.Tensor) -> Place:
        place = self._places.pack(tensor)
        return place if self._filling is None else self._filling.put_off(tensor, place, self.unpack)

    def unpack(self, place: Place) -> torch.Tensor:
        if place.value is None and not self._has_run:
            self._again()
        return value_of(place, self._unit, stays=self._has_run)

    def _again(self) -> None:
        check_versions(self._leaves, self._versions, self._unit)
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        filling = self._places.filling(True)
        hooks = torch.autograd.graph.saved_tensors_hooks(filling, as_packed)
        with until_enough(filling), hooks:
            output: Any = None
            for number, call in enumerate(self._calls):
                if number:
                    args, kwargs = call.given.with_tensor(output)
                with call.conditions.again(), call.around(), parameters_apart(call.sharded):
                    output = call.forward(*args, **kwargs)
        if not is_walked_again():
            self._leaves, self._versions, self._has_run = [], [], True


class _Call(NamedTuple):
    """Of one module of a part. `sharded`: whose parameters autograd keeps as places in their storage."""

    forward: Callable[..., Any]
    around: Around
    conditions: Conditions
    given: _Given
    sharded: weakref.ref[Gathers] | None


class _Given:
    """What a call has beside its tensors: a library names what it leaves out (`attention_mask=None`)."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._spec = tree_flatten((args, kwargs))
        self._beside = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def only_tensor(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        """None where there are several, or something that the script may change until it is needed again."""
        if len(self._places) != 1 or any(type(leaf) not in _UNCHANGING for leaf in self._beside):
            return None
        tensor: torch.Tensor = tree_flatten((args, kwargs))[0][self._places[0]]
        return tensor

    def with_tensor(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        (place,) = self._places
        leaves = [tensor if number == place else leaf for number, leaf in enumerate(self._beside)]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


def _inside(module: torch.nn.Module, unit: str, name: str) -> torch.nn.Module | None:
    """The module of a full name inside a unit; None where there is none."""
    prefix = f"{unit}." if unit else ""
    try:
        return module.get_submodule(name[len(prefix) :]) if name.startswith(prefix) and name != unit else None
    except AttributeError:
        return None
