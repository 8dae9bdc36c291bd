"""FLOPs of one training step by the formulas that others quote, so that their MFU can be set beside ours.

All are for one rank's own tokens. They know decoders of equal layers; for anything else there is the reason.

- `palm`: 6 N + 12 L H Q T a token, N all parameters, the full square of attention (PaLM, arXiv:2204.02311,
  appendix B). nanoGPT's `estimate_mfu` is this with N less the position embedding's table.
- `torchtitan`: 6 N_active + 6 L H (Q + V) T a token, N_active all parameters less the tables that are looked up in
  and not shared with the head, routed experts times active / all; attention full also where it is causal
  (pytorch/torchtitan, torchtitan/models/utils.py, `get_nparams_and_active_nparams` and
  `quadratic_attention_flops_per_token`, as of 2026).
- `megatron`: 6 times the weights of attention projections, feed-forward layers and active experts, 6 h V for the
  logits, and 6 L H (Q + V) T / 2, for it takes all attention to be causal and halves it; neither router nor norms
  (NVIDIA/Megatron-LM, megatron/training/training.py, `num_floating_point_operations`, 2025 on). The vocabulary is
  the head's as it is, padded if the script padded it.

T is the length of a sample, padding and all; L H Q V are layers, heads, and widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memadvisor.analyzers.model_shape import TransformerShape
from memadvisor.analyzers.product_weights import NoTransformer

CONVENTIONS = ("exact", "palm", "torchtitan", "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """FLOPs of the traced step in one convention, and the MFU of the steady steps that follows.

    `reason` says why there are no FLOPs, where there are none.
    """

    flops_per_step: int | None
    mfu: float | None
    reason: str | None


def convention_flops(name: str, shape: TransformerShape) -> int:
    """FLOPs of a step by `palm`, `torchtitan` or `megatron`. Raises NoTransformer where the formula knows no
    such model."""
    if shape.num_frozen_parameters:
        count = f"{shape.num_frozen_parameters:,}"
        raise NoTransformer(f"{count} parameters are frozen, and the formula takes all to be trained")
    return _FORMULAS[name](shape)


def _attention(shape: TransformerShape) -> int:
    """Per token, with all pairs: two products forward and four backward, 2 FLOPs each."""
    widths = shape.key_width + shape.value_width
    return 6 * shape.num_layers * shape.num_heads * widths * shape.sequence


def _active(shape: TransformerShape) -> int:
    """Elements of the experts that run for one token."""
    if not shape.num_experts or not shape.num_active_experts:
        return 0
    return shape.num_expert_weights * shape.num_active_experts // shape.num_experts


def _palm(shape: TransformerShape) -> int:
    if shape.num_experts:
        raise NoTransformer("the formula knows no experts")
    if shape.key_width != shape.value_width:
        raise NoTransformer("keys and values have different widths")
    return (6 * shape.num_parameters + _attention(shape)) * shape.num_tokens


def _torchtitan(shape: TransformerShape) -> int:
    idle = shape.num_expert_weights - _active(shape)
    num_active_parameters = shape.num_parameters - shape.num_embedding_weights - idle
    return (6 * num_active_parameters + _attention(shape)) * shape.num_tokens


def _megatron(shape: TransformerShape) -> int:
    if shape.vocabulary is None:
        raise NoTransformer("there is no head over the vocabulary")
    weights = shape.num_product_weights - shape.num_router_weights + _active(shape)
    return 6 * weights * shape.num_tokens + _attention(shape) * shape.num_tokens // 2


_FORMULAS: dict[str, Callable[[TransformerShape], int]] = {
    "palm": _palm,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
}
