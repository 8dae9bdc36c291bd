"""What a layer moves between its products: norms, sums, dropouts, rotary positions and the activation of its feed-forward block."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.attention import attention_columns
from memadvisor.layout import TrainingStep

# Of an element of the residual stream, what eager code moves besides: copies that make tensors contiguous, casts, and the
# sums and norms of a layer in more kernels than two. From published steps of small models, whose products hide nothing.
_EAGER_STREAM = 24.0
# What an activation function in separate operators moves more of an inner column, for each tensor that it keeps beyond its
# input: gelu_new, which keeps three, reads and writes 36 bytes where one kernel does 4.
_SEPARATE_OPERATORS = 32.0 / 3.0


def stream_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """What norms, sums, dropouts and rotary positions of a layer move, in elements of two bytes."""
    layout, software, hidden = step.layout, step.software, model.hidden
    spread, query = layout.stream_ranks, attention_columns(model)[0]
    # Two norms (read, write), two sums of the residual stream (two reads, one write), dropouts with a mask.
    stream = tokens * hidden * (20.0 + (10.0 if _has_dropout(model, step) else 0.0)) / spread
    if software.reference_code or not software.fused_rotary:
        stream += tokens * hidden * _EAGER_STREAM / spread
    stream *= model.num_sublayers(layer) / 2
    if model.has_attention(layer) and model.positions == 0 and model.relative_buckets == 0:
        stream += tokens * query * 8.0 / layout.tensor  # rotary positions of queries and keys
    if model.has_attention(layer) and model.attention_gate:
        # Its sigmoid, and their product with attention's result.
        stream += tokens * query * 8.0 / layout.tensor
    return stream


def activation_bytes(model: Architecture, step: TrainingStep) -> float:
    """What the activation of a feed-forward block, and its gate, read and write of one inner column."""
    software = step.software
    if software.reference_code:
        separate = max(0, model.reference_code.activation_tensors - 1) * _SEPARATE_OPERATORS
        return (10.0 if model.gated_mlp else 4.0) + separate
    return (6.0 if software.fused_mlp else 10.0) if model.gated_mlp else 4.0


def _has_dropout(model: Architecture, step: TrainingStep) -> bool:
    if step.software.reference_code:
        return model.reference_code.residual_dropout
    return step.software.dropout


def pointwise_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """What both norms and the feed-forward's activation read and write."""
    per_column = activation_bytes(model, step)
    columns = float(model.ffn) if model.has_feed_forward(layer) else 0.0
    if model.experts is not None and model.has_experts(layer):
        passed = model.experts.experts_per_token * step.layout.expert_imbalance
        columns = passed * model.experts.expert_ffn + model.experts.shared_ffn
    of_hidden = 4.0 * min(2, model.num_sublayers(layer)) * model.hidden / step.layout.stream_ranks
    return tokens * (of_hidden + per_column * columns / step.layout.tensor) * step.software.element_bytes / 2
