"""Functions of torch that look at all gradients at once, made right on shards.

The norm that `clip_grad_norm_` clips by is a sum over all ranks' pieces, and an infinity that one rank's
piece holds is an infinity on every rank. Everything else about clipping and loss scaling works on pieces
as it stands (gradients.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad

from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.flat import Slot
from memadvisor.engines.sharding.gradients import GradientShards, ShardedGradient
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.engines.sharding.sharded_step import Swap
from memadvisor.engines.updates.sums import sum_dtype
from memadvisor.errors import PlanError


def patch(slot_of: Callable[[torch.Tensor], Slot | None], undo: Undo) -> None:
    """Patch the functions that the public ones look up when they are called."""
    total_norm = _total_norm(clip_grad._get_total_norm)
    undo.replace(clip_grad, "_get_total_norm", total_norm)
    if hasattr(torch.nn.utils, "get_total_norm"):
        undo.replace(torch.nn.utils, "get_total_norm", total_norm)
    scaler = torch.amp.GradScaler
    undo.replace(scaler, "_unscale_grads_", _unscale(scaler._unscale_grads_, slot_of))


def _total_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        sharded = [g for g in gradients if isinstance(g, ShardedGradient)]
        whole = [g for g in gradients if not isinstance(g, ShardedGradient)]
        power = float(norm_type)
        if sharded and power > 0 and all(g.paged_flat is not None for g in sharded):
            norms = list(_norms_one_by_one(gradients, power))
        elif not sharded or power <= 0:
            return original(gradients, norm_type, error_if_nonfinite, foreach)
        else:
            norms = [_sharded_norm(mine, model, power) for model, mine in _by_model(sharded)]
            if whole:
                norms.append(original(whole, norm_type, False, foreach))
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]), power)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
                "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
                "anyway, set `error_if_nonfinite=False`"
            )
        return norm

    return total_norm


def _norms_one_by_one(gradients: list[torch.Tensor], power: float) -> Iterator[torch.Tensor]:
    """The norm of each gradient, as torch takes it. Those that lie elsewhere are in memory one flat at a time."""
    flats = [g.paged_flat if isinstance(g, ShardedGradient) else None for g in gradients]
    for _, group in itertools.groupby(zip(gradients, flats, strict=True), key=lambda pair: id(pair[1])):
        shard: torch.Tensor | None = None
        for gradient, flat in group:
            if flat is None or not isinstance(gradient, ShardedGradient):
                yield torch.linalg.vector_norm(gradient, power)
                continue
            shard = flat.grad_shard if shard is None else shard
            slot = gradient.slot
            if shard is None:
                raise RuntimeError("this gradient has been dropped")
            yield torch.linalg.vector_norm(slot.view(shard), power)


def _by_model(
    gradients: list[ShardedGradient],
) -> list[tuple[ShardedModel, list[ShardedGradient]]]:
    groups: dict[int, tuple[ShardedModel, list[ShardedGradient]]] = {}
    for gradient in gradients:
        shards = gradient.shards()
        if shards is not None:
            groups.setdefault(id(shards), (shards.sharded, []))[1].append(gradient)
    return list(groups.values())


def _sharded_norm(gradients: list[ShardedGradient], model: ShardedModel, power: float) -> torch.Tensor:
    pieces = [gradient.piece() for gradient in gradients]
    norms = [torch.linalg.vector_norm(p, power, dtype=sum_dtype(p.dtype)) for p in pieces if p.numel()]
    infinite = power == float("inf")
    norm = torch.zeros((), dtype=sum_dtype(pieces[0].dtype), device=pieces[0].device)
    if norms:
        norm = torch.linalg.vector_norm(torch.stack(norms), power).to(norm)
    operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    norm = norm if infinite else norm.pow(power)
    dist.all_reduce(norm, op=operation, group=model.wire.group)
    if not norm.is_cuda:  # there the sum is only queued, and nobody has waited for anybody
        model.have_met()
    return norm if infinite else norm.pow(1.0 / power)


def _unscale(
    original: Callable[..., dict[torch.device, torch.Tensor]],
    slot_of: Callable[[torch.Tensor], Slot | None],
) -> Callable[..., dict[torch.device, torch.Tensor]]:
    def sharded_slot(parameter: torch.Tensor) -> Slot | None:
        # Stage 1 keeps whole gradients, which the scaler unscales itself.
        slot = slot_of(parameter)
        return slot if slot is not None and slot.flat.stage >= 2 else None

    def unscale(
        scaler: Any, optimizer: torch.optim.Optimizer, *args: Any
    ) -> dict[torch.device, torch.Tensor]:
        found_in: dict[int, GradientShards] = {}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            slot = sharded_slot(parameter)
            shards = None if slot is None else slot.token.shards()
            if slot is not None and slot.flat.page is not None:
                raise PlanError(
                    "GradScaler changes gradients that lie on another tier.",
                    hint="leave parameters on the device, or train in bfloat16, which needs no scaling.",
                )
            if slot is not None and shards is not None:
                shards.early.look_at_gradient(slot)
                found_in[id(shards)] = shards
        if not found_in:
            return original(scaler, optimizer, *args)
        swap = Swap(optimizer, sharded_slot, with_state=False)
        try:
            found = original(scaler, optimizer, *args)
        finally:
            swap.undo()
        for shards in found_in.values():
            for infinite in found.values():
                dist.all_reduce(infinite, op=dist.ReduceOp.MAX, group=shards.sharded.wire.group)
        return found

    return unscale
