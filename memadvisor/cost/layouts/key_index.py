"""What choosing the keys that attention sees costs (DeepSeek sparse attention: DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1).

A few narrow heads score every key before a token, and attention sees the best of them: priced as a window of so many keys.
Nothing goes back through the scores, and nothing is kept of them.
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.kernels import Device, matmul_seconds
from memadvisor.layout import TrainingStep


def index_columns(model: Architecture) -> int:
    """Of queries, over all heads of an indexer; 0 of a model without one."""
    return 0 if model.latent is None else model.latent.index_heads * model.latent.index_head_dim


def index_products(model: Architecture, tokens: float) -> list[tuple[float, float, float, float]]:
    """(rows, columns, depth, count) of a layer's: its queries; its key and its heads' weights. Every tensor-parallel rank
    does them."""
    columns, latent = index_columns(model), model.latent
    if latent is None or not columns:
        return []
    queries = (tokens, float(columns), float(latent.q_rank or model.hidden), 1.0)
    return [queries, (tokens, float(latent.index_head_dim + latent.index_heads), float(model.hidden), 1.0)]


def index_seconds(model: Architecture, step: TrainingStep, device: Device) -> float:
    """Scores of one layer's forward; a key is seen by the tokens behind it."""
    latent = model.latent
    if latent is None or not latent.index_heads:
        return 0.0
    rows, keys = step.seq_len / step.layout.context, step.software.seen_len(step.seq_len) / 2.0
    count = float(latent.index_heads * step.layout.micro_batch_size)
    return matmul_seconds(device.wide, rows, keys, latent.index_head_dim, count)


def index_flops(model: Architecture, step: TrainingStep) -> float:
    """Scores of one forward over the global batch, counted in full as attention is."""
    keys = step.software.seen_len(step.seq_len)
    return 2.0 * step.tokens * index_columns(model) * keys * model.n_layers
