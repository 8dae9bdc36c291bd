"""Rows of a tensor that is worked out in chunks, at other positions: views and copies that leave rows whole, and their
backwards (chunked_operators.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memadvisor.engines.losses.chunked_tensor import ChunkedTensor, is_chunked
from memadvisor.engines.losses.expressions import Expression, Moved, Padded
from memadvisor.engines.losses.rows import RowMap, joined

_aten = torch.ops.aten
_Arguments = tuple[Any, ...]


def metadata_of(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """What the operator returns, without values. Raises what it would raise of shapes."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return func(*tree_map_only(torch.Tensor, empty, args), **tree_map_only(torch.Tensor, empty, kwargs))


def chunked_like(
    tensor: ChunkedTensor, metadata: torch.Tensor, expression: Expression, class_dim: int = -1
) -> ChunkedTensor:
    return ChunkedTensor(metadata, expression, tensor.num_rows, tensor.told, class_dim)


# ---- the same rows elsewhere ---------------------------------------------------------------------


def _numbers(tensor: ChunkedTensor) -> torch.Tensor:
    """The tensor's rows by their numbers, in its shape: its classes are one number."""
    lead = [size for dim, size in enumerate(tensor.shape) if dim != tensor.class_dim]
    numbers = tensor.expression.row_map.all_numbers().view(lead).unsqueeze(tensor.class_dim)
    return numbers.expand(tensor.shape)


def _class_dim(numbers: torch.Tensor, width: int) -> int | None:
    """The dimension that classes are along; None where positions are repeated, or classes are no longer all there."""
    wide = [dim for dim in range(numbers.dim()) if numbers.stride(dim) == 0 and numbers.shape[dim] > 1]
    return wide[0] if len(wide) == 1 and numbers.shape[wide[0]] == width and numbers.numel() else None


def rows_elsewhere(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """Views that leave rows whole, and copies."""
    tensor = args[0]
    if not is_chunked(tensor):
        return NotImplemented
    metadata = metadata_of(func, args, kwargs)
    try:
        numbers = func(_numbers(tensor), *args[1:], **kwargs)
    except RuntimeError:  # rows are cut or put together
        return NotImplemented
    is_view = any(row.alias_info is not None for row in func._schema.returns)
    several = isinstance(metadata, (list, tuple))
    results = []
    for place, (like, its) in enumerate(
        zip(metadata, numbers, strict=True) if several else [(metadata, numbers)]
    ):
        class_dim = _class_dim(its, tensor.expression.width)
        if class_dim is None:
            return NotImplemented
        result = chunked_like(
            tensor, like, _moved(tensor.expression, its.select(class_dim, 0).flatten()), class_dim
        )
        if is_view:
            result.parent, tensor.has_views = tensor, True
            result.view_of = _view(func, args[1:], kwargs, place if several else None)
        results.append(result)
    return results if several else results[0]


def _view(
    func: Any, args: _Arguments, kwargs: dict[str, Any], place: int | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    def view(base: torch.Tensor) -> torch.Tensor:
        made = func(base, *args, **kwargs)
        found: torch.Tensor = made if place is None else made[place]
        return found

    return view


def _moved(expression: Expression, numbers: torch.Tensor) -> Expression:
    if torch.equal(numbers, expression.row_map.all_numbers()):
        return expression
    return Moved(expression, RowMap(expression.row_map.num_rows, numbers))


def copied(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    metadata = metadata_of(func, args, kwargs)
    return chunked_like(tensor, metadata, tensor.expression, tensor.class_dim)


def part_of_zeros(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """Gradient of a part, in one of the whole's shape: what autograd makes of slices and of single positions."""
    gradient, sizes, *how = args
    forward = {_aten.slice_backward: _aten.slice.Tensor, _aten.select_backward: _aten.select.int}[
        func.overloadpacket
    ]
    if not is_chunked(gradient) or not gradient.is_by_rows or kwargs or how[0] % len(sizes) == len(sizes) - 1:
        return NotImplemented
    row_map = gradient.expression.row_map
    numbers = torch.full(tuple(sizes[:-1]), -1, device="cpu")
    part = forward(numbers.unsqueeze(-1), *how).squeeze(-1)
    part.copy_(row_map.all_numbers().view(part.shape))
    metadata = metadata_of(func, args, kwargs)
    return chunked_like(
        gradient, metadata, Moved(gradient.expression, RowMap(row_map.num_rows, numbers.flatten()))
    )


def joined_rows(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """Rows of several tensors after one another."""
    tensors = args[0]
    if not all(is_chunked(tensor) and tensor.is_by_rows for tensor in tensors):
        return NotImplemented
    numbers = func([_numbers(tensor)[..., :1] for tensor in tensors], *args[1:], **kwargs)
    metadata = metadata_of(func, args, kwargs)
    expressions = [tensor.expression for tensor in tensors]
    if metadata.shape[-1] != expressions[0].width or len({part.dtype for part in expressions}) > 1:
        return NotImplemented
    row_map = joined([part.row_map for part in expressions], numbers.flatten())
    return (
        NotImplemented
        if row_map is None
        else chunked_like(tensors[0], metadata, Padded(expressions, row_map))
    )
