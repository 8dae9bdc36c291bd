"""What an update, of groups of parameters or of all of them, holds beside the states on one rank's device.

DeepSpeed's ZeRO stage 3 updates group after group of a rank's parameters. Of each it joins the 16-bit gradients to one tensor,
casts that to another in fp32, and lets both go when the group is updated (deepspeed/runtime/zero/stage3.py,
_prepare_fp32_grad_for_sub_group; `sub_group_size` of https://www.deepspeed.ai/docs/config-json/). Activations are gone by then, but
such a tensor is larger than the blocks that they leave in the allocator's cache, which takes more of the device for it.
InternEvo's optimizer does so with all of a rank's parameters (internlm/solver/optimizer/hybrid_zero_optim.py, _step).
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.saved import whole_logits_bytes
from memadvisor.layout import TrainingStep

_JOINED_BYTES, _FP32_BYTES = 2.0, 4.0


def group_update_bytes(step: TrainingStep, parameters: float) -> float:
    """`parameters`: how many the rank updates."""
    return (_JOINED_BYTES + _FP32_BYTES) * _group(step, parameters)


def group_cached_bytes(
    model: Architecture, step: TrainingStep, parameters: float, gone_bytes: float, *, has_logits: bool
) -> float:
    """What the allocator takes for a group beyond a step's peak, while it keeps the `gone_bytes` of the activations: nothing
    where logits left a block as large as the group's fp32 gradients. `parameters`: how many the rank updates."""
    if has_logits and _FP32_BYTES * _group(step, parameters) <= whole_logits_bytes(model, step):
        return 0.0
    return min(group_update_bytes(step, parameters), gone_bytes)


def _group(step: TrainingStep, parameters: float) -> float:
    layout, software = step.layout, step.software
    if layout.zero_stage < 3 or layout.offload_optimizer:
        return 0.0
    return min(software.update_group_elements, parameters)


def held_update_bytes(step: TrainingStep, parameters: float, gradient_bytes: float) -> float:
    """Of an update of all `parameters` of the rank at once; where it joins their gradients, all `gradient_bytes` are let go before."""
    if step.layout.offload_optimizer:
        return 0.0
    held = step.software.update_held_bytes * parameters
    return max(0.0, held - gradient_bytes) if _joins(step) else held


def joined_cached_bytes(step: TrainingStep, parameters: float, gradient_bytes: float) -> float:
    """Blocks of the gradients, and of the tensor that they were joined to, when both are let go: what comes then is fp32, in tensors
    of the parameters' number, and finds no room in either."""
    return gradient_bytes + _JOINED_BYTES * parameters if _joins(step) else 0.0


def _joins(step: TrainingStep) -> bool:
    return step.software.joins_gradients and step.layout.zero_stage < 3 and not step.layout.offload_optimizer
