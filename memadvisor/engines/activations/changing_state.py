"""Buffers that a forward changes (running statistics), attributes that it sets (what it has made for its next call, a
count) and lists and dictionaries that it changes, as they were before it: a second run begins with those, and leaves the
live ones alone, so that they are updated once.

So it is with parameters and buffers that the script puts in place of a module's own for a call
(`torch.func.functional_call`): when the backward comes the module has its own again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memadvisor.engines.activations.changing_containers import OF_EVERY_MODULE, ChangingContainers
from memadvisor.engines.activations.second_run import without_graph

_Entry = tuple[dict[str, Any], str, Any]  # a module's buffers or attributes, name, value before the forward
_ABSENT = object()
# Attributes that a second run begins with again. Others would be held until then: tensors, and all that they came from.
_LIGHT = (type(None), bool, int, float, str)
# Those of other classes (DTensor) are put in place by who shards the model, for each run anew.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class State:
    """What a forward is about to change, as it is before; before it has run, all that it may change. `given`: the
    parameters and buffers that it runs with, which are its module's own or the script's."""

    __slots__ = ("attributes", "buffers", "containers", "given", "light")

    def __init__(
        self, buffers: list[_Entry], layers: list[torch.nn.Module], tensors: list[dict[str, Any]]
    ) -> None:
        self.buffers = buffers
        self.attributes: list[_Entry] = []
        self.light = [(vars(layer), frozenset(vars(layer)), _light_of(vars(layer))) for layer in layers]
        self.containers = ChangingContainers(vars(layer) for layer in layers)
        self.given = [
            (owner, name, value)
            for owner in tensors
            for name, value in owner.items()
            if type(value) in _PLAIN
        ]

    def learn_attributes(self) -> None:
        """After the forward: which attributes it has set, and what it was given."""
        for owner, names, light in self.light:
            self.attributes += [
                (owner, name, old) for name, old in light.items() if owner.get(name, _ABSENT) is not old
            ]
            if not names >= owner.keys():
                self.attributes += [(owner, name, _ABSENT) for name in owner if name not in names]
        self.light = []
        self.containers.learn()
        # A buffer that the forward has replaced is among those that it changes.
        self.given = [
            (owner, name, without_graph(value))
            for owner, name, value in self.given
            if owner.get(name) is value
        ]


class ChangingState:
    """By module, the buffers that its forward changes, once it has run, and the layers that may set attributes. Modules
    are held weakly. A layer sets some in one call and none in the next, so each call is looked at."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, str]]] = (
            weakref.WeakKeyDictionary()
        )
        self._tensors: weakref.WeakKeyDictionary[torch.nn.Module, list[dict[str, Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._layers: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[torch.nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )

    def before(self, module: torch.nn.Module) -> State:
        """Copies of what the forward is about to change; of all buffers the first time."""
        known = self._known.get(module)
        if known is None:
            self._layers[module] = [weakref.ref(each) for each in module.modules() if not _is_of_torch(each)]
            self._tensors[module] = [
                owner for each in module.modules() for owner in (each._parameters, each._buffers) if owner
            ]
            buffers = [(owner, name, _copy_of(value)) for _, owner, name, value in _named_buffers(module)]
        else:
            owners = [(module.get_submodule(path)._buffers, name) for path, name in known]
            buffers = [
                (owner, name, value.clone())
                for owner, name in owners
                if (value := owner.get(name)) is not None
            ]
        layers = [layer for each in self._layers[module] if (layer := each()) is not None]
        return State(buffers, layers, self._tensors[module])

    def learn(self, module: torch.nn.Module, before: State) -> None:
        """After a forward: what it changed. Normalisation changes its own buffers without telling."""
        before.learn_attributes()
        if module not in self._known:
            self._learn_buffers(module, before)
        # Of these there are copies; in a second run they are copies themselves, which would be held beyond it.
        copied = {(id(owner), name) for owner, name, _ in before.buffers}
        before.given = [entry for entry in before.given if (id(entry[0]), entry[1]) not in copied]

    def _learn_buffers(self, module: torch.nn.Module, before: State) -> None:
        """A forward that has made a buffer, or taken one out, is learnt from anew in its next call."""
        norms, names = _norms(module), {(id(owner), name) for owner, name, _ in before.buffers}
        found = {(id(owner), name): (path, value) for path, owner, name, value in _named_buffers(module)}
        made = [
            (owner, name, _ABSENT)
            for _, owner, name, _ in _named_buffers(module)
            if (id(owner), name) not in names
        ]
        changed, entries = [], []
        for owner, name, old in before.buffers:
            path, now = found.get((id(owner), name), ("", _ABSENT))
            if (path in norms and old is not None) or not _is_same(now, old):
                changed.append((path, name))
                entries.append((owner, name, old))
        # The recomputation holds this very state.
        before.buffers = [*entries, *made]
        if not made and found.keys() == names and all(old is not None for *_, old in entries):
            self._known[module] = changed


def _light_of(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, _LIGHT) and name not in OF_EVERY_MODULE
    }


def _is_of_torch(layer: torch.nn.Module) -> bool:
    """Those set nothing in their forwards."""
    return type(layer).__module__.startswith("torch.nn.")


def _norms(module: torch.nn.Module) -> set[str]:
    """Names of the layers inside that keep running statistics."""
    kinds = (torch.nn.modules.batchnorm._NormBase,)
    return {path for path, inner in module.named_modules() if isinstance(inner, kinds)}


def _named_buffers(
    module: torch.nn.Module,
) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor | None]]:
    """Of each buffer: the layer's name, its buffers, the buffer's name, and what it holds, which may have yet to be made."""
    for path, inner in module.named_modules():
        for name, value in inner._buffers.items():
            yield path, inner._buffers, name, value


def _copy_of(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.clone()


def _is_same(now: Any, old: Any) -> bool:
    if not isinstance(now, torch.Tensor) or not isinstance(old, torch.Tensor):
        return now is old
    return now.dtype == old.dtype and now.device == old.device and torch.equal(now, old)


class WithState:
    """Run with all as it was before the first run, and leave what is live untouched."""

    def __init__(self, before: State) -> None:
        self._before = before
        self._live: list[_Entry] = []

    def __enter__(self) -> None:
        before = self._before
        replaced = [
            (owner, name, value)
            for owner, name, value in before.given
            if (live := owner.get(name)) is not value and type(live) in _PLAIN
        ]
        containers = before.containers.as_before()
        entries = (*replaced, *_entries(before), *containers)
        self._live = [(owner, name, owner.get(name, _ABSENT)) for owner, name, _ in entries]
        for entry in (*replaced, *containers):
            _put(*entry)
        for owner, name, value in before.buffers:  # copies: a graph that is kept is recomputed again
            _put(owner, name, value.clone() if isinstance(value, torch.Tensor) else value)
        for entry in before.attributes:
            _put(*entry)

    def __exit__(self, *exception: object) -> None:
        for entry in self._live:
            _put(*entry)


def _entries(state: State) -> Iterator[_Entry]:
    yield from state.buffers
    yield from state.attributes


def _put(owner: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value
