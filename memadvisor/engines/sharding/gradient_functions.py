"""What a function of tensors does to a gradient of which a rank has a part: writes into it, element by element or otherwise,
or gives a view of it. Read off its schema and its tags."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# Collectives that write into what they are given; torch does not say so of them.
_WRITING_COLLECTIVES = {
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "recv_",
    "recv_any_source_",
}
_ALSO_ELEMENTWISE = {"copy_", "masked_fill_"}  # which have no tag


def is_writing_collective(func: Any) -> bool:
    """Whether ranks exchange what it is given, in place."""
    return func.namespace == "c10d" and func.overloadpacket.__name__ in _WRITING_COLLECTIVES


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type) -> list[Any]:
    """Tensors of a kind that it changes: in place, or given as `out`."""
    found: list[Any] = []
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                found += [tensor for tensor in tree_leaves(value) if isinstance(tensor, kind)]
    return found


@cache
def gives_views(func: Any) -> bool:
    """Whether what it gives shares the memory of what it is given."""
    returns = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


@cache
def is_elementwise(func: Any) -> bool:
    """Whether it changes each element of its first argument, of each tensor of a first list, or of an `out`, by the same
    elements of the others, and draws no random numbers."""
    name = func.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name.startswith("_foreach_"):
        has_number_each = name.startswith("_foreach_addc") and func._overloadname == "Tensor"
        return name.endswith("_") and not has_number_each
    num_written = sum(
        each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments
    )
    return num_written == 1 and (torch.Tag.pointwise in func.tags or name in _ALSO_ELEMENTWISE)
