"""Moving a model's parameters into the executor's storage, when it takes the model over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memadvisor.engines.flat import Flat
from memadvisor.engines.gradients import ShardedGradient

if TYPE_CHECKING:
    from memadvisor.engines.executor import Executor


def move_parameters(executor: Executor) -> None:
    """Move parameters into flats, and release those of stage 3: one flat after another, so that no more than one of
    them is in memory twice."""
    with torch.no_grad():
        for flat in executor.flats:
            if flat.stage > 0:
                _move(flat)
                if flat.stage == 3:
                    executor.release(flat)
                for slot in flat.slots:
                    slot.token = (
                        ShardedGradient(slot, executor) if flat.stage >= 2 and flat.trainable else None
                    )
                    if flat.is_cast and flat.trainable:
                        # Gradients come in the dtype that was computed with; what the script finds is float32.
                        slot.parameter.grad_dtype = None


def _move(flat: Flat) -> None:
    flat.full = flat.new(flat.padded_numel)
    flat.full[flat.num_elements :].zero_()
    for slot in flat.slots:
        slot.view(flat.full).copy_(slot.parameter)
        slot.parameter.data = slot.view(flat.full)
    if flat.page is not None:
        flat.page.parameters.put(flat.full)
        flat.page.parameters.settle()
        for slot in flat.slots:
            slot.version = slot.parameter._version  # nothing is written into it since
        return
    flat.own_shard = flat.own_slice(flat.full)
    if flat.stage == 3:
        flat.own_shard = flat.own_shard.clone()
        flat.full = flat.full.to(flat.param_dtype)
