"""Functions of torch that are done in another way on tensors worked out in chunks (chunked_tensor.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from memadvisor.engines.losses.chunked_tensor import ChunkedTensor, is_chunked
from memadvisor.engines.losses.expressions import Evaluation, Operation


def _cross_entropy(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Classes along the second of several dimensions: the same loss of rows, in the same order."""
    scores = args[0] if args else kwargs.get("input")
    names = (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given.get("target")
    if (
        not is_chunked(scores)
        or scores.dim() < 3
        or scores.class_dim != 1
        or not isinstance(target, torch.Tensor)
    ):
        return func(*args, **kwargs)
    if target.shape == scores.shape:  # probabilities
        given["target"] = target.movedim(1, -1).flatten(0, -2)
    else:
        given["target"] = target.flatten()
    given["input"] = scores.movedim(1, -1).flatten(0, -2)
    loss = func(**given)
    return loss.view(scores.shape[0], *scores.shape[2:]) if loss.dim() else loss


def _gather(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Along classes: some of each row."""
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    scores, index, dim = given.get("input"), given.get("index"), given.get("dim")
    if not (
        is_chunked(scores) and scores.is_by_rows and type(index) is torch.Tensor and isinstance(dim, int)
    ):
        return func(*args, **kwargs)
    is_along = dim % scores.dim() == scores.dim() - 1 and index.shape[:-1] == scores.shape[:-1]
    if not is_along or scores.is_made or scores.expression.row_map.has_gaps or given.get("sparse_grad"):
        return func(*args, **kwargs)
    gathered: torch.Tensor = _Gathered.apply(scores, index)  # type: ignore[no-untyped-call]
    return gathered


class _Gathered(torch.autograd.Function):
    """torch's own gradient is made of as many zeros as the scores have elements."""

    @staticmethod
    def forward(ctx: Any, scores: ChunkedTensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.scores = scores.detach()
        make, flat = Evaluation(scores.expression), index.reshape(-1, index.shape[-1])
        # No view of another is returned: autograd lets nobody write into what it takes for one.
        made = torch.empty(index.shape, dtype=scores.dtype, device=scores.device)
        for positions, rows in scores.expression.row_map.chunks(scores.num_rows):
            positions.put(made.view(flat.shape), make(rows).gather(1, positions.of(flat)))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (index,), scores = ctx.saved_tensors, ctx.scores
        values, places = gradient.reshape(-1, index.shape[-1]), index.reshape(-1, index.shape[-1])
        width = scores.expression.width

        def call(take: Any, inputs: Any) -> torch.Tensor:
            rows = take(values)
            spread: torch.Tensor = rows.new_zeros(len(rows), width).scatter_add_(1, take(places), rows)
            return spread

        metadata = torch.empty_strided(scores.shape, scores.stride(), dtype=gradient.dtype, device="meta")
        operation = Operation(scores.expression, gradient.dtype, (), call)
        return ChunkedTensor(metadata, operation, scores.num_rows, scores.told), None


ChunkedTensor.functions |= {
    F.cross_entropy: _cross_entropy,
    torch.gather: _gather,
    torch.Tensor.gather: _gather,
}
