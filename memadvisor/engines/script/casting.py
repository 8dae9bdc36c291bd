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
    made: dict[int, torch.Tensor] = {}

    def cast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == dtype or not is_meant(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor.to(dtype)
        return made[id(tensor)]

    return _cast(values, cast_tensor)


def _cast(values: Any, cast_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    leaves, spec = tree_flatten(values)
    others = [_cast_leaf(leaf, cast_tensor) for leaf in leaves]
    if all(other is leaf for other, leaf in zip(others, leaves, strict=True)):
        return values
    return tree_unflatten(others, spec)


def _cast_leaf(leaf: Any, cast_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Of what torch does not know as a container, too."""
    if isinstance(leaf, torch.Tensor):
        return cast_tensor(leaf)
    changed = {
        name: other for name, value in _parts(leaf) if (other := _cast(value, cast_tensor)) is not value
    }
    if not changed:
        return leaf
    if isinstance(leaf, tuple):
        make = type(leaf)._make  # type: ignore[attr-defined]  # of a named tuple, past a __new__ of its own
        return make(changed.get(place, value) for place, value in enumerate(leaf))
    made = copy.copy(leaf)  # a constructor may do more than keep what it is given
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
