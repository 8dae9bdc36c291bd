"""How long the products of a rank's experts wait for their launches, where each expert's are launched by themselves.

Transformer Engine's GroupedLinear goes from expert to expert for the products, and with operands of fewer than 16 bits for the
cast of what comes into them (transformer_engine/pytorch/module/grouped_linear.py); CUDA graphs of attention and of the router
leave them out, for their shapes change from step to step.
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import HOST_OPERATOR_S
from memadvisor.cost.layouts.kernels import Device, matmul_seconds
from memadvisor.layout import TrainingStep

# Of up (with its gate) and down.
_PRODUCTS = 2
# Of a layer's launches, those of the experts and what is around them.
_EXPERTS_SHARE = 0.5


def waiting_seconds(
    model: Architecture, step: TrainingStep, layer: int, tokens: float, device: Device
) -> tuple[float, float]:
    """What launching them takes longer than doing them, forward and backward; `tokens` of a microbatch on one rank."""
    layout, software, experts = step.layout, step.software, model.experts
    if experts is None or not model.has_experts(layer) or not software.launches_each_expert:
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
