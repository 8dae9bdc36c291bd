"""Buffers that a forward changes (running statistics) and attributes that it sets (what it has made for its next call, a
count), as they were before it: a second run begins with those, and leaves the live ones alone, so that they are updated
once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

_Entry = tuple[dict[str, Any], str, Any]  # a module's buffers or attributes, name, value before the forward
_ABSENT = object()
# Attributes that a second run begins with again. Others would be held until then: tensors, and all that they came from.
_LIGHT = (type(None), bool, int, float, str)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class State:
    """What a forward is about to change, as it is before; before it has run, all that it may change."""

    __slots__ = ("attributes", "buffers", "light")

    def __init__(self, buffers: list[_Entry], layers: list[torch.nn.Module]) -> None:
        self.buffers = buffers
        self.attributes: list[_Entry] = []
        self.light = [(vars(layer), frozenset(vars(layer)), _light_of(vars(layer))) for layer in layers]

    def learn_attributes(self) -> None:
        """After the forward: which attributes it has set."""
        for owner, names, light in self.light:
            self.attributes += [
                (owner, name, old) for name, old in light.items() if owner.get(name, _ABSENT) is not old
            ]
            if not names >= owner.keys():
                self.attributes += [(owner, name, _ABSENT) for name in owner if name not in names]
        self.light = []


class ChangingState:
    """By module, the buffers that its forward changes, once it has run, and the layers that may set attributes. Modules
    are held weakly. A layer sets some in one call and none in the next, so each call is looked at."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, str]]] = (
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
            buffers = [(owner, name, value.clone()) for _, owner, name, value in _named_buffers(module)]
        else:
            owners = [(module.get_submodule(path)._buffers, name) for path, name in known]
            buffers = [
                (owner, name, value.clone()) for owner, name in owners if (value := owner[name]) is not None
            ]
        layers = [layer for each in self._layers[module] if (layer := each()) is not None]
        return State(buffers, layers)

    def learn(self, module: torch.nn.Module, before: State) -> None:
        """After a forward: what it changed. Normalisation changes its own buffers without telling."""
        before.learn_attributes()
        if module in self._known:
            return
        norms = _norms(module)
        changed = [
            (path, name)
            for (path, _, name, now), (_, _, old) in zip(_named_buffers(module), before.buffers, strict=True)
            if path in norms or not torch.equal(now, old)
        ]
        # The recomputation holds this very state.
        names = [(path, name) for path, _, name, _ in _named_buffers(module)]
        before.buffers = [entry for name, entry in zip(names, before.buffers, strict=True) if name in changed]
        self._known[module] = changed


def _light_of(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, _LIGHT) and name not in _OF_EVERY_MODULE
    }


def _is_of_torch(layer: torch.nn.Module) -> bool:
    """Those set nothing in their forwards."""
    return type(layer).__module__.startswith("torch.nn.")


def _norms(module: torch.nn.Module) -> set[str]:
    """Names of the layers inside that keep running statistics."""
    kinds = (torch.nn.modules.batchnorm._NormBase,)
    return {path for path, inner in module.named_modules() if isinstance(inner, kinds)}


def _named_buffers(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Of each buffer: the layer's name, its buffers, the buffer's name, and what it holds."""
    for path, inner in module.named_modules():
        for name, value in inner._buffers.items():
            if value is not None:
                yield path, inner._buffers, name, value


class WithState:
    """Run with all as it was before the first run, and leave what is live untouched."""

    def __init__(self, before: State) -> None:
        self._before = before
        self._live: list[_Entry] = []

    def __enter__(self) -> None:
        before = self._before
        self._live = [(owner, name, owner.get(name, _ABSENT)) for owner, name, _ in _entries(before)]
        for owner, name, value in before.buffers:
            owner[name] = value.clone()  # a graph that is kept is recomputed again
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
