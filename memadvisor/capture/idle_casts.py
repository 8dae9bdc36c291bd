"""Casts of the script's to float32 of what is float32, which do nothing: from torch's profiler.

They reach no dispatch mode, for torch returns the tensor itself. Under autocast, where it may be bfloat16, they are copies.

The profiler tells them where it records what operators are called with. Under torch.func's transforms it then holds tensors
that would be freed, up to as many bytes again as a step's peak: such a step is no account of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_FLOAT32 = 6  # its number in torch (c10/core/ScalarType.h), as which the profiler has an argument
_OPERATORS = "aten::"
# By operator and how many arguments it has, which of these is the dtype. With eight `to` takes all options of a tensor, as
# `x.to(device)` does, whose dtype is that of `x` whatever that is.
_PLACES = {("aten::to", 5): 1, ("aten::to", 6): 2, ("aten::softmax", 3): 2, ("aten::log_softmax", 3): 2}
_AS_ANOTHER = "aten::type_as"


class SeenCast(NamedTuple):
    """`like`: the address of the storage whose dtype was asked for; 0 where float32 was."""

    time_ns: int
    operator: str
    address: int
    shape: str
    like: int


def idle_casts(called: list[Any]) -> list[SeenCast]:
    """In order of time."""
    return sorted(cast for node in called if (cast := _idle_cast(node)) is not None)


def has_transformed(called: list[Any]) -> bool:
    """Whether operators were called with tensors that stand for others, as torch.func's transforms have them: strided ones of
    some elements, without a storage."""
    return any(
        getattr(value, "layout", None) is torch.strided and not value.storage_data_ptr and all(value.sizes)
        for node in called
        for value in node.extra_fields.inputs
    )


def is_transforming() -> bool:
    """Whether a transform of torch.func is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def called_by_script(roots: list[Any]) -> list[Any]:
    """The operators that the script itself has called, and no operator. Without recursion."""
    found, pending = [], list(roots)
    while pending:
        node = pending.pop()
        if node.name.startswith(_OPERATORS):
            found.append(node)
        else:
            pending += node.children
    return found


def _idle_cast(node: Any) -> SeenCast | None:
    name = node.name
    if name != _AS_ANOTHER and not any(name == known for known, _ in _PLACES):
        return None
    inputs = node.extra_fields.inputs
    place = _PLACES.get((name, len(inputs)))
    if name == _AS_ANOTHER:
        tensors = [each for each in inputs if _is_float32(each)]
        like = tensors[1].storage_data_ptr if len(tensors) == 2 else None
    else:
        like = 0 if place is not None and inputs[place] == _FLOAT32 else None
    if like is None or not _is_float32(inputs[0]) or _has_copied(node):
        return None
    return SeenCast(node.start_time_ns, name, inputs[0].storage_data_ptr or 0, str(inputs[0].sizes), like)


def _is_float32(value: Any) -> bool:
    return getattr(value, "dtype", None) is torch.float32


def _has_copied(node: Any) -> bool:
    """To another device, or into another layout."""
    children: Iterator[Any] = iter(node.children)
    return any(child.name == "aten::_to_copy" or _has_copied(child) for child in children)
