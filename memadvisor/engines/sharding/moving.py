"""Moving a model's parameters into the executor's storage, when it takes the model over."""

from __future__ import annotations

from collections.abc import Container

import torch

from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.gradients import GradientShards, ShardedGradient
from memadvisor.engines.sharding.holders import held_beside, is_plain, num_holders
from memadvisor.engines.sharding.paged_flats import Page
from memadvisor.engines.sharding.parcels import in_storage_order
from memadvisor.engines.sharding.released import hide, release
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.engines.sharding.sources import Lates


def move_parameters(sharded: ShardedModel, lates: Lates, shards: GradientShards) -> None:
    """Move parameters into flats, and release those of stage 3: one flat after another, so that no more than one of
    them is in memory twice, and of those that lie elsewhere none."""
    held = _held(sharded)
    with torch.no_grad():
        for flat in sharded.flats:
            if flat.stage > 0:
                if flat.stage == 3:
                    for slot in flat.slots:
                        if id(slot.parameter) in held:
                            lates.loans.followers.add(slot, slot.parameter.data)
                if flat.page is not None:
                    _put_away(flat, flat.page, lates)
                else:
                    _move(flat, held)
                    if flat.stage == 3:
                        release(flat, lates)
                for slot in flat.slots:
                    slot.token = ShardedGradient(slot, shards) if flat.stage >= 2 and flat.trainable else None
                    if flat.has_cast_gradients:
                        # Gradients come in the dtype that was computed with; what the script finds is float32.
                        slot.parameter.grad_dtype = None


def _put_away(flat: Flat, page: Page, lates: Lates) -> None:
    """From where the script has them, and free them; then the full flat is made, as it is between uses: without memory."""
    own = [slot.parameter.detach() for slot in flat.slots]
    dense = [
        p.contiguous() if p.stride() != slot.stride else p for p, slot in zip(own, flat.slots, strict=True)
    ]
    page.parameters.put_parts(
        [(slot.start, in_storage_order(p)) for p, slot in zip(dense, flat.slots, strict=True)]
    )
    for slot in flat.slots:
        hide(slot, lates)
    own.clear()
    dense.clear()
    flat.full = flat.new(flat.padded_numel)
    flat.full.untyped_storage().resize_(0)


def _move(flat: Flat, held: Container[int]) -> None:
    flat.full = flat.new(flat.padded_numel, flat.script_dtype)
    flat.full[flat.num_elements :].zero_()
    for slot in flat.slots:
        slot.view(flat.full).copy_(slot.parameter)
        if flat.stage == 3 or id(slot.parameter) not in held:
            slot.parameter.data = slot.view(flat.full)
    flat.own_shard = flat.own_slice(flat.full)
    if flat.stage == 3 or flat.has_masters:
        flat.own_shard = flat.own_shard.to(flat.dtype, copy=True)
        flat.full = flat.full.to(flat.param_dtype)
    flat.num_own_holders = num_holders(flat.full)


def _held(sharded: ShardedModel) -> frozenset[int]:
    """Parameters, by identity, whose memory the script has other tensors of (`p.data`, what it has loaded by `assign`): in
    stages 1 and 2 such a parameter stays there, as one that is put elsewhere later (replaced.py); in stage 3 it follows."""
    root = sharded.live.root
    held = held_beside(each for each in {*root.parameters(), *root.buffers()} if is_plain(each))
    return frozenset(
        id(slot.parameter)
        for flat in sharded.flats
        if flat.stage > 0
        for slot in flat.slots
        if slot.parameter.untyped_storage().data_ptr() in held
    )
