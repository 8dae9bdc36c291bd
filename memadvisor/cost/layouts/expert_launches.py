"""What it takes longer that a rank's experts are gone through one by one: launches of each, and gradients of weights they share.

Transformer Engine's GroupedLinear goes from expert to expert for the products, and with operands of fewer than 16 bits for the
cast of what comes into them (transformer_engine/pytorch/module/grouped_linear.py); CUDA graphs of attention and of the router
leave them out, for their shapes change from step to step.

Hugging Face's classes loop over experts where no kernel takes all of them: transformers 5 with `experts_implementation` eager, and
GraniteMoe's and JetMoe's of 2024. Each expert's weights are a part of one stacked tensor, taken by its number, and autograd
makes the gradient of such a part one of the whole stack, zeros but for it, and adds them up (aten::select_backward): 2 bytes
written, 4 read and 2 written of each of its elements, for each expert.
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import HOST_OPERATOR_S
from memadvisor.cost.layouts.kernels import Device, matmul_seconds, stream_seconds
from memadvisor.layout import TrainingStep

# Of up (with its gate) and down.
_PRODUCTS = 2
# Of an expert in such a loop: finding and gathering its tokens, two products, taking both weights, chunk, activation, gate,
# weights of the tokens and their sum; as many again for each in the backward, and for the gradients of what was taken.
_LOOPED_OPERATORS = (14, 28)
_STACK_BYTES = 8.0
# Of a layer's launches, those of the experts and what is around them.
_EXPERTS_SHARE = 0.5


def waiting_seconds(
    model: Architecture, step: TrainingStep, layer: int, tokens: float, device: Device
) -> tuple[float, float]:
    """What launching them takes longer than doing them, forward and backward; `tokens` of a microbatch on one rank."""
    layout, software, experts = step.layout, step.software, model.experts
    if experts is None or not model.has_experts(layer):
        return 0.0, 0.0
    if software.loops_experts:
        return _looped_seconds(model, step, layer, device)
    if not software.launches_each_expert:
        return 0.0, 0.0
    here = max(1.0, experts.num_experts / step.expert_ranks)
    parts = step.expert_tensor_ranks
    rows = tokens * experts.experts_per_token * layout.expert_imbalance * parts / layout.tensor / here
    inner = experts.expert_ffn / parts
    up = matmul_seconds(device, rows, (2 if model.gated_mlp else 1) * inner, model.hidden, here)
    done_s = up + matmul_seconds(device, rows, model.hidden, inner, here)
    casts = 1 if device.is_narrow else 0
    weights = 0 if software.lora is not None else 1
    one_s = HOST_OPERATOR_S * min(1.0, software.launch_share / _EXPERTS_SHARE)
    forward_s, backward_s = (here * _PRODUCTS * (products + casts) * one_s for products in (1, 1 + weights))
    return max(0.0, forward_s - done_s), max(0.0, backward_s - (1 + weights) * done_s)


def _looped_seconds(
    model: Architecture, step: TrainingStep, layer: int, device: Device
) -> tuple[float, float]:
    layout, experts = step.layout, model.experts
    assert experts is not None
    here = max(1.0, experts.num_experts / step.expert_ranks)
    stack = model.expert_layer_parameters(layer) / (layout.tensor * layout.expert)
    is_trained = step.software.lora is None
    forward_s, backward_s = (here * count * HOST_OPERATOR_S for count in _LOOPED_OPERATORS)
    return forward_s, backward_s + stream_seconds(device, here * stack * _STACK_BYTES * is_trained)
