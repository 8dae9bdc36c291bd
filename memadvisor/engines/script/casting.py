"""What a call is given, or returns, with its tensors in another dtype."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

IsMeant = Callable[[torch.Tensor], bool]


def cast(values: Any, dtype: torch.dtype, is_meant: IsMeant) -> Any:
    """`values` with the tensors that are meant in `dtype`, in containers of the same classes.

    Containers are those that torch knows (libraries register their own outputs), named tuples, mappings and dataclasses.
    Those without such a tensor are left as they are. A tensor that is there twice is cast once.
    """
    return _Cast(dtype, is_meant).of(values)


class _Cast:
    """One look through a value."""

    def __init__(self, dtype: torch.dtype, is_meant: IsMeant) -> None:
        self._dtype = dtype
        self._is_meant = is_meant
        self._made: dict[int, torch.Tensor] = {}
        self._under_way: set[int] = set()  # containers that the look is inside of: one may hold itself

    def of(self, values: Any) -> Any:
        leaves, spec = tree_flatten(values)
        others = [self._leaf(leaf) for leaf in leaves]
        if all(other is leaf for other, leaf in zip(others, leaves, strict=True)):
            return values
        return tree_unflatten(others, spec)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        if id(leaf) in self._under_way:
            return leaf
        self._under_way.add(id(leaf))
        try:
            changed = {name: made for name, value in _parts(leaf) if (made := self.of(value)) is not value}
        finally:
            self._under_way.discard(id(leaf))
        return _with(leaf, changed) if changed else leaf

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == self._dtype or not self._is_meant(tensor):
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor.to(self._dtype)
        return self._made[id(tensor)]


def _with(container: Any, changed: dict[Any, Any]) -> Any:
    """A copy with other parts. Constructors, which may do more than keep what they are given, are not called."""
    if isinstance(container, tuple):
        make = type(container)._make  # type: ignore[attr-defined]  # of a named tuple, past its __new__
        return make(changed.get(place, value) for place, value in enumerate(container))
    made = copy.copy(container)
    for name, value in changed.items():
        if isinstance(made, MutableMapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)  # of a frozen dataclass, too
    return made


def _parts(leaf: Any) -> Iterator[tuple[Any, Any]]:
    """What is in a container, by place, key or field; nothing where it is none."""
    if isinstance(leaf, tuple) and hasattr(leaf, "_make"):
        yield from enumerate(leaf)
    elif isinstance(leaf, MutableMapping):
        yield from leaf.items()
    elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                yield field.name, getattr(leaf, field.name)
