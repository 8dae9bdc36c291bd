"""A linear layer whose output is worked out in chunks (chunked_tensor.py), and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memadvisor.engines.losses import chunked_functions, chunked_operators  # noqa: F401  # what is done with its result
from memadvisor.engines.losses.chunked_tensor import ChunkedTensor, Told, is_chunked
from memadvisor.engines.losses.expressions import Evaluation, Product
from memadvisor.engines.losses.rows import on_host
from memadvisor.engines.updates.sums import sum_dtype


def chunked_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_rows: int,
    told: Told,
    keep: Callable[[Product], None],
    done: Callable[[Product], None],
) -> torch.Tensor:
    """torch.nn.functional.linear, `num_rows` rows at a time. `keep` is given what the result's values are made of; so is
    `done` when a backward is through."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    result: torch.Tensor = _ChunkedLinear.apply(hidden, weight, bias, num_rows, told, keep, done)  # type: ignore[no-untyped-call]
    return result


class _ChunkedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_rows: int,
        told: Told,
        keep: Callable[[Product], None],
        done: Callable[[Product], None],
    ) -> ChunkedTensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.num_rows = num_rows
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        product = Product(flat, weight.detach(), None if bias is None else bias.detach())
        keep(product)
        ctx.product, ctx.done = product, done
        like = torch.empty(*hidden.shape[:-1], len(weight), dtype=hidden.dtype, device="meta")
        return ChunkedTensor(like, product, num_rows, told)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # for gradients of gradients
            found = _differentiable(gradient, hidden, weight, bias)
        else:
            found = _gradients(gradient, hidden, weight, ctx.needs_input_grad[:3], ctx.num_rows)
        ctx.done(ctx.product)
        return *found, None, None, None, None


def _gradients(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, ...], num_rows: int
) -> tuple[torch.Tensor | None, ...]:
    if is_chunked(gradient):
        if not gradient.is_made and _is_whole(gradient):
            return _in_chunks(gradient, hidden, weight, needs, num_rows)
        gradient = gradient.read("linear_backward")
    rows, flat = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    of_hidden = (rows @ weight).view_as(hidden) if needs[0] else None
    return of_hidden, rows.t() @ flat if needs[1] else None, rows.sum(0) if needs[2] else None


def _is_whole(gradient: ChunkedTensor) -> bool:
    """Whether each position is of the layer's own row, or of none."""
    numbers = gradient.expression.row_map.numbers
    if not gradient.is_by_rows or numbers is None:
        return gradient.is_by_rows
    positions = on_host(0, len(numbers))
    return len(numbers) == gradient.expression.row_map.num_rows and bool(
        ((numbers == positions) | (numbers < 0)).all()
    )


def _in_chunks(
    gradient: ChunkedTensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    needs: tuple[bool, ...],
    num_rows: int,
) -> tuple[torch.Tensor | None, ...]:
    """Sums over rows of 16-bit products are added up in float32, as inside of one product."""
    row_map = gradient.expression.row_map
    make = Evaluation(gradient.expression)
    flat = hidden.reshape(-1, hidden.shape[-1])
    new = torch.zeros_like if row_map.has_gaps else torch.empty_like
    of_hidden = new(flat) if needs[0] else None
    of_weight = of_bias = None
    wide = sum_dtype(weight.dtype)
    for positions, rows in row_map.chunks(num_rows):
        its = make(rows)
        if of_hidden is not None:
            positions.put(of_hidden, its @ weight)
        if needs[1]:
            if of_weight is None:
                of_weight = torch.mm(its.t(), positions.of(flat)).to(wide)
            elif wide is weight.dtype:
                of_weight.addmm_(its.t(), positions.of(flat))
            else:
                of_weight += torch.mm(its.t(), positions.of(flat))
        if needs[2]:
            part = its.sum(0, dtype=wide)
            of_bias = part if of_bias is None else of_bias.add_(part)
        del its
    return (
        None if of_hidden is None else of_hidden.view_as(hidden),
        None if of_weight is None else of_weight.to(weight.dtype),
        None if of_bias is None else of_bias.to(weight.dtype),
    )


class _Made(torch.autograd.Function):
    """A tensor's values in memory; autograd goes on as if it were the same."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.read("linear_backward") if is_chunked(tensor) else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def _differentiable(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    made: torch.Tensor = _Made.apply(gradient)  # type: ignore[no-untyped-call]
    rows = made.reshape(-1, gradient.shape[-1])
    of_hidden = (rows @ weight).view_as(hidden)
    of_weight = rows.t() @ hidden.reshape(-1, hidden.shape[-1])
    return of_hidden, of_weight, None if bias is None else rows.sum(0)
