"""What a layer moves between its products: norms, sums, dropouts, rotary positions and the activation of its feed-forward block."""

from __future__ import annotations

from typing import NamedTuple

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.attention import attention_columns
from memadvisor.layout import TrainingStep

# Of an element of the residual stream, what eager code moves besides: copies that make tensors contiguous, casts, and the
# sums and norms of a layer in more kernels than two. From published steps of small models, whose products hide nothing.
_EAGER_STREAM = 24.0
# What an activation function in separate operators moves more of an inner column, for each tensor that it keeps beyond its
# input: gelu_new, which keeps three, reads and writes 36 bytes where one kernel does 4.
_SEPARATE_OPERATORS = 32.0 / 3.0


class _Moved(NamedTuple):
    """Bytes of an element, forward and backward."""

    forward: float
    backward: float


# Of Hugging Face's classes whose RMSNorm is written in operators of its own (modeling_llama.py): copied to fp32, squared,
# averaged, scaled, cast, weighed. Counted of every operator of such a layer, forward and backward, in transformers 5.24
# (tests/cost/layouts/test_layer_streams.py has the norm and the rotary positions). Of an element of the stream: a norm, with
# the sums of its result's gradients from the products that read it; a sum; of a column of queries and keys: rotary positions (negated, joined, twice multiplied, added), a norm of their own.
_NORM, _SUM, _ROTARY, _HEAD_NORM = _Moved(36, 101), _Moved(6, 6), _Moved(20, 32), _Moved(36, 93)
# The same under autocast, whose residual stream is in fp32, and whose norms' results are cast for each product.
_WIDE_NORM, _WIDE_SUM, _WIDE_ROTARY = _Moved(43, 133), _Moved(10, 10), _Moved(36, 58)
# As one kernel has them: dropout with its mask, rotary positions, the gate of attention's result.
_DROPOUT, _FUSED_ROTARY, _GATE = _Moved(5, 10), _Moved(8, 16), _Moved(8, 16)
# Kernels that do nothing but stream reach 0.88 of a sheet's bandwidth (BabelStream's triad: 0.86 of an A100's, 0.9 of an H100's
# and an RTX 4090's), which is that much of what `bandwidth_share` has others reach.
_STREAMED = 0.75
# Tokens gathered for their experts, and their results added up, as few kernels have it. torchtitan's code
# (torchtitan/models/moe/moe.py and utils.py) gathers them (4 bytes), pads and permutes them (8), puts the results back in order
# (4), weighs them in fp32 (cast, multiplied, cast: 20, of which torch.compile leaves 4) and adds them to the stream (6).
_ROUTED, _ROUTED_APART, _WEIGHED_APART = 8.0, 42.0, 16.0
# Hugging Face's classes gather them (4), weigh them (4) and add them up by an operator that scatters, which the backward of the
# gather does too: of 16 bits 1.5 ms for 65,536 rows of 2,880 on B300 (github.com/whitecircle/halo, agent-docs/optimization/
# grouped-gemm.md), 54 bytes of an element at the bandwidth that kernels reach. Forward and backward alike, so that of the three
# passes that streams are counted with each has two thirds.
_ROUTED_REFERENCE = 42.0
# Where a norm keeps a copy of its input in fp32 (ReferenceCode.norm_bytes), its operators are separate.
_COPIES_INPUT = 8.0


def stream_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """What norms, sums, dropouts and rotary positions of a layer move, in elements of two bytes."""
    layout, software, hidden = step.layout, step.software, model.hidden
    if has_separate_operators(model, step):
        return (
            tokens
            * _STREAMED
            * sum(count * moved.forward for count, moved in _separate_operators(model, step, layer))
        )
    spread, query = layout.stream_ranks, attention_columns(model)[0]
    # Two norms (read, write), two sums of the residual stream (two reads, one write), dropouts with a mask.
    stream = tokens * hidden * (20.0 + (10.0 if _has_dropout(model, step) else 0.0)) / spread
    if software.reference_code or not software.fused_rotary:
        stream += tokens * hidden * _EAGER_STREAM / spread
    stream *= model.num_sublayers(layer) / 2
    if model.has_attention(layer) and model.positions == 0 and model.relative_buckets == 0:
        stream += tokens * query * 8.0 / layout.tensor  # rotary positions of queries and keys
    if model.has_attention(layer) and model.qk_norm:
        keys = model.n_kv_heads * model.head_dim
        stream += tokens * (query + keys) * 4.0 / layout.tensor  # norms of theirs (read, write)
    if model.has_attention(layer) and model.attention_gate:
        # Its sigmoid, and their product with attention's result.
        stream += tokens * query * 8.0 / layout.tensor
    return stream


def routed_bytes(step: TrainingStep) -> float:
    """What brings a token to an expert's product and back moves, of an element, beside exchanges between ranks."""
    if not step.software.weighs_experts_wide:
        return _ROUTED_REFERENCE if step.software.reference_code or step.software.liger else _ROUTED
    return _ROUTED_APART - (_WEIGHED_APART if step.software.fused_mlp else 0.0)


def more_backward_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """What the backward of these moves beyond twice what the forward does."""
    if not has_separate_operators(model, step):
        return 0.0
    operators = _separate_operators(model, step, layer)
    return (
        tokens * _STREAMED * sum(count * (moved.backward - 2 * moved.forward) for count, moved in operators)
    )


def has_separate_operators(model: Architecture, step: TrainingStep) -> bool:
    """Whether norms and rotary positions are many kernels each: in 16 bits, and nothing patches them."""
    software = step.software
    is_patched = software.patched_code or software.linear_loss  # Liger's kernels come together
    is_separate = software.reference_code and not is_patched and software.element_bytes == 2
    return is_separate and model.reference_code.norm_bytes >= _COPIES_INPUT


def _separate_operators(model: Architecture, step: TrainingStep, layer: int) -> list[tuple[float, _Moved]]:
    """Elements of a token on one rank, and what each moves."""
    layout, is_wide = step.layout, step.software.autocast
    stream = model.hidden / layout.stream_ranks
    found = [
        (model.num_norms(layer) * stream, _WIDE_NORM if is_wide else _NORM),
        (model.num_sublayers(layer) * stream, _WIDE_SUM if is_wide else _SUM),
    ]
    if model.reference_code.residual_dropout:
        found.append((model.num_sublayers(layer) * stream, _DROPOUT))
    if not model.has_attention(layer):
        return found
    query = attention_columns(model)[0] / layout.tensor
    columns = query + model.n_kv_heads * model.head_dim / layout.tensor
    if model.positions == 0 and model.relative_buckets == 0:
        if model.latent is not None:  # a part of each head alone
            found.append((query, _FUSED_ROTARY))
        else:
            found.append((columns, _WIDE_ROTARY if is_wide else _ROTARY))
    if model.qk_norm:
        found.append((columns, _HEAD_NORM))
    if model.attention_gate:
        found.append((query, _GATE))
    return found


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
