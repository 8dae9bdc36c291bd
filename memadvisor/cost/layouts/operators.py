"""Recomputation operator by operator, as torchtitan's `selective` with `op` does it: which products' results are kept.

Each block keeps its input, the result of every second product of a layer in the order they run, of fused attention, and of
what scatters activations among ranks; all else runs again until the last input is there that the backward
asks for, so that the block's last product never does (https://github.com/pytorch/torchtitan, its list of saved operators and
count of `mm` per block, 2024 and 2025; torch.utils.checkpoint's early stop). Projections of queries, keys and values are
three products there, and the gate's two. Grouped products of routed experts, the router's and exchanges between ranks are none
of those counted: they run again (of torchtitan's models Qwen3, whose list has no exchange, models/qwen3/infra/parallelize.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.recurrences import recurrence_products
from memadvisor.layout import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProduct:
    """`count` products of (rows x depth) by (depth x columns) on one rank. `is_partial`: tensor parallelism parts its depth."""

    rows: float
    columns: float
    depth: float
    count: float = 1.0
    is_partial: bool = False

    @property
    def shape(self) -> tuple[float, float, float, float]:
        return self.rows, self.columns, self.depth, self.count


def kept_products(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> list[BlockProduct]:
    """Of `tokens` on one rank, those whose results are there when the backward begins."""
    return _counted(model, step, layer, tokens)[::2]


def repeated_products(
    model: Architecture, step: TrainingStep, layer: int, tokens: float
) -> list[BlockProduct]:
    """Those that the backward runs again."""
    counted = _counted(model, step, layer, tokens)
    # The last product's result is nobody's input in the block.
    return counted[:-1][1::2] + _routed(model, step, layer, tokens)


def unneeded_products(
    model: Architecture, step: TrainingStep, layer: int, tokens: float
) -> list[BlockProduct]:
    """Of a layer that runs again as a whole, those that do not: its last, where it is a sum's operand and nothing else
    (torch.utils.checkpoint's early stop, where it is not reentrant; jax.checkpoint leaves out what no backward asks for).
    """
    software = step.software
    if not software.stops_early or software.reference_code or _reads_last(model, step, layer):
        return []
    return _counted(model, step, layer, tokens)[-1:]


def unread_kept_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """Of the last product's result, where it is kept and nothing in the block reads it but a sum: the second run stops before it,
    so that it is never handed out, and goes with the layer's backward. So does what its scattered sum leaves on a rank."""
    counted = _counted(model, step, layer, tokens)
    if len(counted) % 2 == 0 or _reads_last(model, step, layer):
        return 0.0
    return 2.0 * counted[-1].rows * counted[-1].columns + _scattered_bytes(model, step, tokens)


def _reads_last(model: Architecture, step: TrainingStep, layer: int) -> bool:
    """Whether more than a sum reads the last product's result."""
    is_read = step.software.dropout or not model.has_feed_forward(layer) or _has_norms_behind(model)
    return is_read or (model.experts is not None and model.has_experts(layer))


def _has_norms_behind(model: Architecture) -> bool:
    """BERT's, Gemma's of the second generation on, and OLMo's, whose norms of queries are as wide as all heads."""
    return not model.final_norm or model.norms_per_layer > 2 or model.qk_norm >= model.hidden


def operators_saved_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """What one layer keeps of one microbatch of `tokens` on one rank until its backward."""
    layout = step.layout
    stream = 2.0 * tokens * model.hidden / layout.stream_ranks
    kept = stream
    kept += sum(2.0 * each.rows * each.columns for each in kept_products(model, step, layer, tokens))
    sublayers = model.num_sublayers(layer)
    attentions = (2 if model.has_cross_attention(layer) else 1) if model.has_attention(layer) else 0
    if step.software.fused_attention:  # the result, and one float32 of each row of scores
        value = model.head_dim if model.latent is None else model.latent.value_head_dim
        kept += attentions * tokens * model.n_heads * (2.0 * value + 4.0) / layout.tensor
    return kept + sublayers * _scattered_bytes(model, step, tokens)


def _scattered_bytes(model: Architecture, step: TrainingStep, tokens: float) -> float:
    """Of one sum behind attention or feed-forward, on one rank."""
    layout = step.layout
    if layout.tensor == 1 or not layout.sequence_parallel:
        return 0.0
    return 2.0 * tokens * model.hidden / layout.stream_ranks


def repeated_flops(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """Of the products that one rank's backward of a microbatch runs again."""
    return sum(
        2.0 * each.count * each.rows * each.columns * each.depth
        for each in repeated_products(model, step, layer, tokens)
    )


def _counted(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> list[BlockProduct]:
    """The layer's products of plain matrices, in the order they run."""
    tp, hidden = step.layout.tensor, float(model.hidden)
    found = [
        BlockProduct(rows=rows, columns=columns, depth=depth, is_partial=columns == hidden)
        for rows, columns, depth, _ in recurrence_products(model, layer, tokens, tp)
    ]
    if model.has_attention(layer):
        found += _attention_products(model, step, tokens)
    if model.has_cross_attention(layer):
        query = model.n_heads * model.head_dim / tp
        keys = model.n_kv_heads * model.head_dim / tp
        source = step.microbatch_tokens
        found += [
            BlockProduct(rows=tokens, columns=query, depth=hidden),
            BlockProduct(rows=source, columns=keys, depth=hidden),
            BlockProduct(rows=source, columns=keys, depth=hidden),
            BlockProduct(rows=tokens, columns=hidden, depth=query, is_partial=True),
        ]
    inner = float(model.ffn) if model.has_feed_forward(layer) else 0.0
    if model.experts is not None and model.has_experts(layer):
        inner = float(model.experts.shared_ffn)
    if inner:
        up = BlockProduct(rows=tokens, columns=inner / tp, depth=hidden)
        found += [up] * (2 if model.gated_mlp else 1)
        found.append(BlockProduct(rows=tokens, columns=hidden, depth=inner / tp, is_partial=True))
    return found


def _attention_products(model: Architecture, step: TrainingStep, tokens: float) -> list[BlockProduct]:
    tp, hidden, latent = step.layout.tensor, float(model.hidden), model.latent

    def product(columns: float, depth: float, is_partial: bool = False) -> BlockProduct:
        return BlockProduct(rows=tokens, columns=columns, depth=depth, is_partial=is_partial)

    if latent is None:
        query, keys = model.n_heads * model.head_dim / tp, model.n_kv_heads * model.head_dim / tp
        gated = query * (2 if model.attention_gate else 1)
        projections = [product(columns, hidden) for columns in (gated, keys, keys)]
        return [*projections, product(hidden, query, is_partial=True)]
    query = model.n_heads * (latent.nope_head_dim + latent.rope_head_dim) / tp
    value = model.n_heads * latent.value_head_dim / tp
    rank, kv_rank = latent.q_rank, float(latent.kv_rank)
    queries = [product(query, hidden)] if not rank else [product(rank, hidden), product(query, rank)]
    return [
        *queries,
        product(kv_rank + latent.rope_head_dim, hidden),
        product(model.n_heads * latent.nope_head_dim / tp + value, kv_rank),
        product(hidden, value, is_partial=True),
    ]


def _routed(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> list[BlockProduct]:
    """The router's and the experts' products, but for the experts' last, whose results are kept or nobody's input."""
    if model.experts is None or not model.has_experts(layer):
        return []
    experts, layout = model.experts, step.layout
    here = max(1.0, experts.num_experts / layout.expert)
    rows = tokens * experts.experts_per_token * layout.expert_imbalance / here
    up = BlockProduct(
        rows=rows, columns=experts.expert_ffn / layout.tensor, depth=float(model.hidden), count=here
    )
    router = BlockProduct(rows=tokens, columns=float(experts.num_experts), depth=float(model.hidden))
    return [router, *[up] * (2 if model.gated_mlp else 1)]
