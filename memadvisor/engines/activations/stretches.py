"""Several units in a row that keep the first one's input alone, and run again before the last one's backward.

The script calls its units one by one, with code of its own between them, so nothing is called ahead of it: each
unit runs when it is called, and what autograd saves for it is packed as a place. The first place that is asked for in
the backward has the innermost stretch around its unit run again, which fills the places of the units that this stretch
keeps all for, and gives inner stretches their inputs. A place lets go of its value when autograd lets go of the
place. What a unit is called with is kept until it has run again for good, but for what a unit before it in the stretch
has returned, the very tensor, unchanged: that is made again. So whatever the script does between two units, results are right.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memadvisor.cost.stretches import Stretches
from memadvisor.engines.activations.inner_hooks import FiringOnce
from memadvisor.engines.activations.second_run import (
    Around,
    Conditions,
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
    without_graph,
)
from memadvisor.stretches import Stretch


@dataclass(frozen=True, slots=True)
class _Made:
    """An argument that an earlier call of the stretch returns, as its leaf of this number."""

    call: _Call
    number: int


class _Call:
    """A unit's call in a pass: what it takes to run it again, and the places of what autograd has saved for it."""

    def __init__(self, run: Pass, unit: str, forward: Callable[..., Any], around: Around) -> None:
        self.run = run
        self.unit = unit
        self.forward: Callable[..., Any] | None = forward
        self.around = around
        self.places = Places()
        self.returned: list[Returned] = []
        self.given: dict[_Made, Any] = {}  # by a second run of a stretch around this one's
        self.running: tuple[Any, Any] | None = None  # the arguments, while the first run is under way
        self.walks_own_graph = False
        self._is_filled = False  # by the last second run that it takes part in
        self._held: weakref.ref[Any] | None = None

    def begins(self, args: Any, kwargs: Any) -> bool:
        """Note what the call is made with; returns whether an earlier call of the pass has made any of it."""
        leaves, self.spec = tree_flatten((args, kwargs))
        self.leaves = each_once(self.run.origin_of, leaves)
        self.versions = versions_of(self.leaves)
        self.conditions: Conditions | None = Conditions(leaves)
        return any(True for _ in self.takes())

    def takes(self) -> Iterator[_Made]:
        """What earlier calls of the pass make for it."""
        return (leaf for leaf in self.leaves if isinstance(leaf, _Made))

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Those of its first run. Autograd holds them with each place, so their end is that of all of them."""
        unpack = self.unpack
        self._held = weakref.ref(unpack, lambda _: self.ends())
        return torch.autograd.graph.saved_tensors_hooks(self.places.pack, unpack)

    @property
    def is_held(self) -> bool:
        """Whether autograd holds anything that was saved for it."""
        return self._held is not None and self._held() is not None

    def unpack(self, place: Place) -> torch.Tensor:
        if place.value is None and self.running is not None:
            self.walks_own_graph = True  # the unit's forward asks for gradients of its own
            leaves, spec = tree_flatten(self.running)
            args, kwargs = tree_unflatten(each_once(without_graph, leaves), spec)
            self._play(args, kwargs, (self.places.filling(True), as_packed))
        elif place.value is None and not self._is_filled:
            self.run.again(self.run.stretches.around(self.unit)[-1])
        return value_of(place, self.unit, stays=self._is_filled)

    def let_go(self) -> None:
        """No run makes it again after this one: what autograd now holds is all that its backward needs."""
        self.leaves, self.versions, self.given, self._is_filled = [], [], {}, True

    def ends(self) -> None:
        """Nothing that was saved for it is kept any more: what it was called with goes with its own backward."""
        if self.run.is_in_backward():
            self.forget()
        self.run.ends_if_unused()

    def forget(self) -> None:
        self.leaves, self.versions, self.given, self.returned = [], [], {}, []
        self.forward = self.conditions = None
        self.around = contextlib.nullcontext

    def again(self, made: dict[_Made, Any], *, keeps_all: bool, is_last: bool) -> list[Any]:
        """Run it a second time; returns the leaves of what it returns."""
        args, kwargs = tree_unflatten([self._leaf(leaf, made) for leaf in self.leaves], self.spec)
        if keeps_all:
            output = self._play(args, kwargs, (self.places.filling(is_last), as_packed))
        else:
            output = self._play(args, kwargs, None if self.walks_own_graph else (_forgotten, _never))
        required = {returned.number: returned.requires_grad for returned in self.returned}
        return [
            leaf.detach().requires_grad_(required.get(number, False)) if _is_tensor(leaf) else leaf
            for number, leaf in enumerate(tree_leaves(output))
        ]

    def _play(self, args: Any, kwargs: Any, hooks: tuple[Any, Any] | None) -> Any:
        """The forward with the random numbers, casts and buffers of the first time; None where it is cut short."""
        if self.forward is None or self.conditions is None:
            raise RuntimeError("Trying to backward through the graph a second time")
        saving = (
            contextlib.nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks)
        )
        with self.conditions.again(), self.around(), saving, until_enough(hooks and hooks[0]):
            return self.forward(*args, **kwargs)
        return None

    def _leaf(self, leaf: Any, made: dict[_Made, Any]) -> Any:
        if not isinstance(leaf, _Made):
            return leaf
        return made[leaf] if leaf in made else self.given[leaf]


class Pass:
    """One pass through the units of an outermost stretch, from first to last."""

    def __init__(
        self, stretches: Stretches, stretch: Stretch, is_in_backward: Callable[[], bool], told: Told
    ) -> None:
        self.stretches = stretches
        self._told = told
        self.stretch = stretch
        self.is_in_backward = is_in_backward
        self._calls: dict[str, _Call] = {}
        self._have_run: set[Stretch] = set()
        self._is_open = True

    @property
    def expected(self) -> str | None:
        """The unit that comes next; None when all have been called."""
        return self.stretch[len(self._calls)] if len(self._calls) < len(self.stretch) else None

    def close(self) -> None:
        """No more calls belong to it."""
        self._is_open = False
        self.ends_if_unused()

    def ends_if_unused(self) -> None:
        """Where all graphs are gone, walked or not. Calls and pass hold each other, so nothing else would end them."""
        if not self._is_open and not any(call.is_held for call in self._calls.values()):
            for call in self._calls.values():
                call.forget()
            self._calls.clear()

    def call(
        self,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        around: Around,
        firing: FiringOnce | None = None,
    ) -> tuple[Any, bool]:
        """Call the unit that is expected; returns what it returns, and whether it takes what an earlier one made."""
        unit = self.expected
        if unit is None:
            raise AssertionError("all units of the stretch have been called")
        call = _Call(self, unit, forward, around)
        is_linked = call.begins(args, kwargs)
        call.running = (args, kwargs)
        watched = firing.first_run(call.places.__len__) if firing is not None else contextlib.nullcontext()
        try:
            with call.hooks(), watched:
                output = forward(*args, **kwargs)
        finally:
            call.running = None
        self._calls[unit] = call
        call.returned = [
            Returned(number, leaf) for number, leaf in enumerate(tree_leaves(output)) if _is_tensor(leaf)
        ]
        return output, is_linked

    def origin_of(self, leaf: Any) -> Any:
        """Who has made an argument; else what is kept of it: without the graph that has made it."""
        if not _is_tensor(leaf):
            return leaf
        for call in self._calls.values():
            for returned in call.returned:
                if returned.is_unchanged(leaf):
                    return _Made(call, returned.number)
        return kept_of(leaf, self._told)

    def again(self, stretch: Stretch) -> None:
        """Run a stretch again; the one around it before that, where that has to make its input."""
        around = [other for other in self.stretches.around(stretch[0]) if len(other) > len(stretch)]
        if around and not self._has_inputs(stretch):
            self.again(around[-1])
        made: dict[_Made, Any] = {}
        items = self._items(stretch)
        last_user = {leaf: call for item in items for call in self._of(item) for leaf in call.takes()}
        for item in items:
            keeps_all = self.stretches.keeps_all(item, stretch)
            for call in self._of(item) if not keeps_all else ():
                call.given |= {
                    leaf: made[leaf] for leaf in call.takes() if leaf in made and leaf.call.unit not in item
                }
            if item is items[-1] and not keeps_all:
                break  # it runs by itself, at once
            for call in self._of(item):
                is_last = item is items[-1]
                check_versions(call.leaves, call.versions, call.unit)
                returned = call.again(made, keeps_all=keeps_all, is_last=is_last)
                if keeps_all and self._is_last_run_of(call.unit):
                    call.let_go()
                # Of the rest what autograd or an inner stretch keeps stays.
                made = {leaf: value for leaf, value in made.items() if last_user[leaf] is not call}
                numbered = ((_Made(call, number), value) for number, value in enumerate(returned))
                made |= {leaf: value for leaf, value in numbered if leaf in last_user}
                del returned, numbered
        if not is_walked_again():
            self._have_run.add(stretch)

    def _is_last_run_of(self, unit: str) -> bool:
        """Not of a graph that is kept, nor where a loss of an inner stretch alone has its backward before the others."""
        return not is_walked_again() and self._have_run.issuperset(self.stretches.around(unit)[:-1])

    def _items(self, stretch: Stretch) -> list[Stretch]:
        return [item for item in self.stretches.body(stretch) if self._of(item)]

    def _of(self, item: Stretch) -> list[_Call]:
        return [self._calls[unit] for unit in item if unit in self._calls]

    def _has_inputs(self, stretch: Stretch) -> bool:
        """Whether what the stretch takes from units outside of it is there."""
        return all(
            leaf in call.given
            for call in self._of(stretch)
            for leaf in call.takes()
            if leaf.call.unit not in stretch
        )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _forgotten(tensor: torch.Tensor) -> None:
    return None


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the graph of a second run is never walked")
