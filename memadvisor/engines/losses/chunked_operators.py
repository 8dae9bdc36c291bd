"""What operators do on tensors that are worked out in chunks (chunked_tensor.py).

An operator's result is another such tensor where each row of it needs the same row of its tensors alone: elementwise ones,
softmaxes, and the backwards of these and of losses. What is left of a row when its classes are gone is made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memadvisor.engines.losses.chunked_tensor import ChunkedTensor, is_chunked
from memadvisor.engines.losses.chunked_views import (
    chunked_like,
    copied,
    joined_rows,
    metadata_of,
    part_of_zeros,
    rows_elsewhere,
)
from memadvisor.engines.losses.expressions import Evaluation, Operation, Padded, changed, version_of
from memadvisor.engines.losses.rows import joined
from memadvisor.engines.updates.sums import sum_dtype

_aten = torch.ops.aten
_Arguments = tuple[Any, ...]
_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction
# Zeros stay zeros, whatever else they are called with; a tensor of no dimension aside.
_KEEPING_ZEROS = (_aten._to_copy, _aten.mul, _aten.div, _aten.neg)


def run(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """An operator with such a tensor among its arguments."""
    operator = str(func.overloadpacket)
    given = args
    args, kwargs = tree_map_only(
        ChunkedTensor, lambda tensor: tensor.made(operator) if tensor.is_made else tensor, (args, kwargs)
    )
    chunked = [value for value in tree_flatten((args, kwargs))[0] if is_chunked(value)]
    if not chunked:
        out = func(*args, **kwargs)
        return given[0] if func._schema.is_mutable and given and out is args[0] else out
    rule = _in_place if func._schema.is_mutable else _rule(func)
    try:
        done = rule(func, args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # the operator's own, which it raises again, or ours, which must not end a training
        chunked[0].told(f"{operator}: {type(error).__name__} in chunks")
        done = NotImplemented
    return _on_whole_values(func, given, args, kwargs) if done is NotImplemented else done


def _rule(func: Any) -> Callable[[Any, _Arguments, dict[str, Any]], Any]:
    rule = _RULES.get(func) or _RULES.get(func.overloadpacket)
    if rule is not None:
        return rule
    is_alike = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    return _elementwise if is_alike else lambda func, args, kwargs: NotImplemented


def _on_whole_values(func: Any, given: _Arguments, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """What has no rule. Whoever writes, or returns a view, does so where all find it."""
    operator = str(func.overloadpacket)
    shares = func._schema.is_mutable or any(row.alias_info is not None for row in func._schema.returns)
    get = (lambda tensor: tensor.made(operator)) if shares else (lambda tensor: tensor.read(operator))
    whole_args, whole_kwargs = tree_map_only(ChunkedTensor, get, (args, kwargs))
    out = func(*whole_args, **whole_kwargs)
    is_first = (
        func._schema.is_mutable and len(args) > 0 and isinstance(out, torch.Tensor) and out is whole_args[0]
    )
    return given[0] if is_first else out


def _in_place(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """An elementwise operator on a tensor whose memory would be nobody else's gives it another expression."""
    target, name = args[0], func._schema.name.removeprefix("aten::")
    if not is_chunked(target) or target.parent is not None or target.has_views or not name.endswith("_"):
        return NotImplemented
    packet = getattr(_aten, name[:-1], None)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if (
        is_random
        or torch.Tag.pointwise not in func.tags
        or packet is None
        or func._overloadname not in packet.overloads()
    ):
        return NotImplemented
    made = _elementwise(getattr(packet, func._overloadname), args, kwargs)
    if not is_chunked(made) or made.dtype != target.dtype:
        return NotImplemented
    target.expression = made.expression
    return target


# ---- rows by themselves --------------------------------------------------------------------------

_Take = Callable[[torch.Tensor], torch.Tensor]  # some rows of a plain tensor
_Part = Callable[[_Take, Sequence[torch.Tensor]], Any]  # an argument, for some rows


def _elementwise(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """Each row of the result is made of the same row of every tensor."""
    flat, spec = tree_flatten((args, kwargs))
    chunked = [value for value in flat if is_chunked(value)]
    first = chunked[0]
    if any(not other.is_by_rows or other.shape != first.shape for other in chunked):
        return NotImplemented
    row_map = first.expression.row_map
    if any(not other.expression.row_map.is_like(row_map) for other in chunked[1:]):
        return _sum_of_parts(func, args, kwargs)
    plain = [value for value in flat if isinstance(value, torch.Tensor) and not is_chunked(value)]
    if row_map.has_gaps and (
        func.overloadpacket not in _KEEPING_ZEROS or any(value.dim() for value in plain)
    ):
        return NotImplemented
    parts = _parts(flat, first)
    metadata = metadata_of(func, args, kwargs)
    if parts is None or not isinstance(metadata, torch.Tensor) or metadata.shape != first.shape:
        return NotImplemented

    def call(take: _Take, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        its_args, its_kwargs = tree_unflatten([part(take, inputs) for part in parts], spec)
        result: torch.Tensor = func(*its_args, **its_kwargs)
        return result

    inputs = [other.expression for other in chunked]
    return chunked_like(first, metadata, Operation(first.expression, metadata.dtype, inputs, call))


def _parts(flat: Sequence[Any], like: ChunkedTensor) -> list[_Part] | None:
    """An operator's arguments by rows. They hold no tensor that is worked out in chunks, but its place."""
    parts: list[_Part] = []
    num_inputs = 0
    for value in flat:
        if is_chunked(value):
            parts.append(lambda take, inputs, place=num_inputs: inputs[place])  # type: ignore[misc]
            num_inputs += 1
            continue
        part = _rows_of_plain(value, like) if isinstance(value, torch.Tensor) else _constant(value)
        if part is None:
            return None
        parts.append(part)
    return parts


def _constant(value: Any) -> _Part:
    return lambda take, inputs: value


def _rows_of_plain(given: torch.Tensor, like: ChunkedTensor) -> _Part | None:
    """A plain tensor that is broadcast to `like`'s shape; None where its rows cannot be told without much memory. The
    script may write into it before a chunk is made: a small one is copied, of a large one it is noticed."""
    shape, value = like.shape, given
    if value.dim() == 0:
        return _constant(value.clone())
    if value.dim() > len(shape):
        return None
    value = value[(None,) * (len(shape) - value.dim())]
    if value.stride(-1) == 0:
        value = value[..., :1]
    is_small = value.numel() <= like.num_rows * shape[-1]
    value = value.clone() if is_small else value
    width = value.shape[-1]
    if value.shape[:-1].numel() == 1:
        return _constant(value.reshape(1, width))
    if value.shape[:-1] != torch.Size(shape[:-1]):
        if width > 1:
            return None
        value = value.expand(*shape[:-1], width)
    # The version is the script's own tensor's: below autograd views have others.
    matrix, version = value.reshape(-1, width), version_of(given)

    def part(take: _Take, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if not is_small and version_of(given) != version:
            raise changed("a tensor that the script has together with the last layer's output has")
        return take(matrix)

    return part


def _converted(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """To another dtype, on the same device."""
    device = kwargs.get("device")
    if device is not None and torch.device(device) != args[0].device:
        return NotImplemented
    kept = {name: value for name, value in kwargs.items() if name == "dtype"}
    made = _elementwise(func, args, kept)
    if is_chunked(made) and kwargs.get("memory_format") is not None:
        return copied(_aten.clone.default, (made,), {"memory_format": kwargs["memory_format"]})
    return made


def _along_classes(place: int) -> Callable[[Any, _Arguments, dict[str, Any]], Any]:
    """Of operators that take a row whole: their dimension, at this place of their arguments, is the classes'."""

    def rule(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
        num_dims = next(value.dim() for value in args if is_chunked(value))
        if len(args) <= place or args[place] % num_dims != num_dims - 1:
            return NotImplemented
        return _elementwise(func, (*args[:place], -1, *args[place + 1 :]), kwargs)

    return rule


def _sum_of_parts(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """Gradients of the whole and of parts of it, added up."""
    if func is not _aten.add.Tensor or kwargs or len(args) != 2 or not all(map(is_chunked, args)):
        return NotImplemented
    expressions = [tensor.expression for tensor in args]
    first, second = (part.row_map.all_numbers() for part in expressions)
    numbers = torch.where(first >= 0, first, second)
    is_at_odds = bool(((first >= 0) & (second >= 0) & (first != second)).any())
    row_map = joined([part.row_map for part in expressions], numbers)
    if is_at_odds or row_map is None:
        return NotImplemented
    metadata = metadata_of(func, args, kwargs)
    padded = [Padded([part], row_map) for part in expressions]
    sums = Operation(padded[0], metadata.dtype, padded, lambda take, inputs: func(*inputs))
    return chunked_like(args[0], metadata, sums)


def _loss_backward(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """nll_loss_backward(gradient, log-probabilities, targets, class weights, reduction, ignored index, total weight)."""
    gradient, scores, target, weight, reduction, ignored, total_weight = args
    if not is_chunked(scores) or is_chunked(gradient) or not scores.is_by_rows or scores.dim() != 2:
        return NotImplemented
    metadata = metadata_of(func, args, kwargs)
    version = version_of(target)

    def call(take: _Take, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if version_of(target) != version:
            raise changed("the loss's targets have")
        its = take(gradient) if reduction == _NONE else gradient
        made: torch.Tensor = func(its, inputs[0], take(target), weight, reduction, ignored, total_weight)
        return made

    return chunked_like(
        scores, metadata, Operation(scores.expression, metadata.dtype, [scores.expression], call)
    )


# ---- what is left when classes are gone ----------------------------------------------------------


def _loss_forward(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """nll_loss_forward(log-probabilities, targets, class weights, reduction, ignored index): loss and total weight."""
    scores, target, weight, reduction, ignored = args
    if (
        not is_chunked(scores)
        or not scores.is_by_rows
        or scores.dim() != 2
        or scores.expression.row_map.has_gaps
    ):
        return NotImplemented
    make, row_map = Evaluation(scores.expression), scores.expression.row_map
    losses = (
        torch.empty(len(row_map), dtype=scores.dtype, device=scores.device) if reduction == _NONE else None
    )
    sums, weights = [], []
    wide = sum_dtype(scores.dtype) if losses is None else scores.dtype
    weight = None if weight is None else weight.to(wide)
    for positions, rows in row_map.chunks(scores.num_rows):
        each = _SUM if losses is None else _NONE
        loss, total = func(make(rows).to(wide), positions.of(target), weight, each, ignored)
        sums.append(loss)
        weights.append(total)
        if losses is not None:
            positions.put(losses, loss)
    if losses is not None:
        return losses, weights[0]
    loss, total = torch.stack(sums).sum(), torch.stack(weights).sum()
    loss = loss / total if reduction == _MEAN else loss
    return loss.to(scores.dtype), total.to(scores.dtype)


def _over_classes(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """Reductions along the last dimension, and what they choose there."""
    tensor = args[0]
    names = [row.name for row in func._schema.arguments]
    place = names.index("dim")
    dims = args[place] if place < len(args) else kwargs.get("dim")
    last: Any = -1 if isinstance(dims, int) else [-1]
    dims = [dims] if isinstance(dims, int) else dims
    flat = tree_flatten((args[1:], kwargs))[0]
    is_whole = not is_chunked(tensor) or not tensor.is_by_rows or tensor.expression.row_map.has_gaps
    if is_whole or not dims or [dim % tensor.dim() for dim in dims] != [tensor.dim() - 1]:
        return NotImplemented
    if any(isinstance(value, torch.Tensor) for value in flat):
        return NotImplemented
    args = (*args[:place], last, *args[place + 1 :]) if place < len(args) else args
    kwargs = {**kwargs, "dim": last} if "dim" in kwargs else kwargs
    metadata = metadata_of(func, (tensor, *args[1:]), kwargs)
    make, row_map = Evaluation(tensor.expression), tensor.expression.row_map
    likes = (metadata,) if isinstance(metadata, torch.Tensor) else tuple(metadata)
    made = [torch.empty(like.shape, dtype=like.dtype, device=tensor.device) for like in likes]
    for positions, rows in row_map.chunks(tensor.num_rows):
        found = func(make(rows), *args[1:], **kwargs)
        for whole, part in zip(made, (found,) if isinstance(found, torch.Tensor) else found, strict=True):
            positions.put(whole.view(len(row_map), -1), part.reshape(len(rows), -1))
    return made[0] if isinstance(metadata, torch.Tensor) else tuple(made)


def _over_all(
    combine: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Any, _Arguments, dict[str, Any]], Any]:
    def rule(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if len(args) > 1 or not is_chunked(tensor) or tensor.expression.row_map.has_gaps:
            return NotImplemented
        make = Evaluation(tensor.expression)
        row_map = tensor.expression.row_map
        return combine(
            torch.stack([func(make(rows), **kwargs) for _, rows in row_map.chunks(tensor.num_rows)])
        )

    return rule


def _sum_of_all(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
    """A sum, or a mean, whose chunks are not of one size."""
    dtype = metadata_of(func, args, kwargs).dtype
    total = _over_all(lambda sums: sums.sum())(_aten.sum.default, args, {"dtype": sum_dtype(dtype)})
    if total is NotImplemented:
        return NotImplemented
    return (total / args[0].numel() if func is _aten.mean.default else total).to(dtype)


_ELSEWHERE = (
    *(
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.squeeze.dim,
    ),
    *(
        _aten.squeeze.dims,
        _aten.squeeze.default,
        _aten.unsqueeze.default,
        _aten.transpose.int,
        _aten.permute.default,
    ),
    *(
        _aten.unbind.int,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.t.default,
        _aten.alias.default,
    ),
    *(_aten.detach.default, _aten._reshape_alias.default),
)
_OVER_CLASSES = (
    *(_aten.sum.dim_IntList, _aten.mean.dim, _aten.logsumexp.default, _aten.amax.default, _aten.amin.default),
    *(_aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim, _aten.topk.default),
)
_RULES: dict[Any, Callable[[Any, _Arguments, dict[str, Any]], Any]] = {
    **dict.fromkeys(_ELSEWHERE, rows_elsewhere),
    **dict.fromkeys(_OVER_CLASSES, _over_classes),
    _aten.clone: copied,
    _aten._to_copy: _converted,
    _aten.slice_backward: part_of_zeros,
    _aten.select_backward: part_of_zeros,
    _aten.stack: joined_rows,
    _aten.cat: joined_rows,
    _aten._log_softmax: _along_classes(1),
    _aten._softmax: _along_classes(1),
    _aten._log_softmax_backward_data: _along_classes(2),
    _aten._softmax_backward_data: _along_classes(2),
    _aten.nll_loss_forward: _loss_forward,
    _aten.nll_loss_backward: _loss_backward,
    _aten.sum.default: _sum_of_all,
    _aten.mean.default: _sum_of_all,
    _aten.max.default: _over_all(torch.max),
    _aten.min.default: _over_all(torch.min),
    _aten.any.default: _over_all(torch.any),
    _aten.all.default: _over_all(torch.all),
}

ChunkedTensor.run_operator = staticmethod(run)
