"""Buffers that a forward changes (running statistics), as they were before it: a second run begins with those, and
leaves the live ones alone, so that they are updated once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

Buffers = list[tuple[dict[str, Any], str, torch.Tensor]]  # a module's buffers, name, value before the forward


class ChangingBuffers:
    """By module, the buffers that its forward changes, once it has run. Modules are held weakly."""

    def __init__(self) -> None:
        # Layers inside a module, and which of their buffers its forward changes.
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, str]]] = (
            weakref.WeakKeyDictionary()
        )

    def before(self, module: torch.nn.Module) -> Buffers:
        """Copies of the buffers that the forward is about to change; all of them the first time."""
        known = self._known.get(module)
        if known is None:
            return [(owner, name, value.clone()) for _, owner, name, value in _named_buffers(module)]
        owners = [(module.get_submodule(path)._buffers, name) for path, name in known]
        return [(owner, name, value.clone()) for owner, name in owners if (value := owner[name]) is not None]

    def learn(self, module: torch.nn.Module, before: Buffers) -> None:
        """After the first forward: which buffers it changed. Normalisation changes its own without telling."""
        if module in self._known:
            return
        norms = _norms(module)
        changed = [
            (path, name)
            for (path, _, name, now), (_, _, old) in zip(_named_buffers(module), before, strict=True)
            if path in norms or not torch.equal(now, old)
        ]
        # In place: the recomputation holds this very list.
        names = [(path, name) for path, _, name, _ in _named_buffers(module)]
        before[:] = [entry for name, entry in zip(names, before, strict=True) if name in changed]
        self._known[module] = changed


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


class WithBuffers:
    """Run with the buffers as they were before the first run, and leave the live ones untouched."""

    def __init__(self, before: Buffers) -> None:
        self._before = before
        self._live: list[Any] = []

    def __enter__(self) -> None:
        self._live = [owner[name] for owner, name, _ in self._before]
        for owner, name, value in self._before:
            owner[name] = value.clone()  # a graph that is kept is recomputed again

    def __exit__(self, *exception: object) -> None:
        for (owner, name, _), value in zip(self._before, self._live, strict=True):
            owner[name] = value
