"""What published tables measured: seconds of a step and bytes, from the columns that they have."""

from __future__ import annotations

import pandas as pd

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import StepEstimate

GIB, MIB = 2.0**30, 2.0**20


def rate_per_gpu(table: pd.DataFrame) -> pd.Series:
    """Tokens of a step over tokens a second of all accelerators; without a global batch a step is a microbatch of each."""
    named = [name for name in ("global_batch_seqs", "global_batch_size") if name in table]
    sequences = table[named[0]] if named else table.micro_batch_size * table.grad_accum * table.n_gpus
    return sequences * table.seq_len / (table.tokens_per_s_per_gpu * table.n_gpus)


def rate(table: pd.DataFrame) -> pd.Series:
    sequences = (
        table.global_batch_seqs
        if "global_batch_seqs" in table
        else table.micro_batch_size * table.grad_accum * table.dp
    )
    return sequences * table.seq_len / table.tokens_per_s


def from_flops(table: pd.DataFrame) -> pd.Series:
    """From published FLOP/s of the model's FLOPs, causal attention counted in full."""
    found = []
    rates = table.bf16_tflops_per_gpu if "bf16_tflops_per_gpu" in table else table.model_tflops_per_gpu
    for row, tflops_per_gpu in zip(table.itertuples(), rates, strict=True):
        model = load_architecture(str(row.model))
        per_token = 6.0 * (model.num_parameters() - model.embedding_parameters())
        per_token += 12.0 * model.n_layers * model.n_heads * model.head_dim * row.seq_len
        tokens = row.global_batch_seqs * row.seq_len
        found.append(per_token * tokens / (tflops_per_gpu * 1e12 * row.n_gpus))
    return pd.Series(found, index=table.index)


def from_recomputed_flops(table: pd.DataFrame) -> pd.Series:
    """From FLOP/s of a GPT that recomputes all of each layer (arXiv:2104.04473, equation 3)."""
    attention, head = (
        table.seq_len / (6 * table.hidden),
        table.vocab / (16 * table.n_layers * table.hidden),
    )
    flops = 96.0 * table.global_batch_seqs * table.seq_len * table.n_layers * table.hidden**2
    return flops * (1 + attention + head) / (table.tflops_per_gpu * 1e12 * table.n_gpus)


def seconds(table: pd.DataFrame) -> pd.Series:
    return table.step_time_s


def allocated(estimate: StepEstimate) -> float:
    return max(memory.allocated_bytes for memory in (estimate.first, estimate.last, estimate.worst))


def with_context(estimate: StepEstimate) -> float:
    return estimate.worst.total_bytes


def before_first_update(estimate: StepEstimate) -> float:
    """What is reserved in a job's first forward and backward: Adam's two moments, 8 of the state's 12 B a parameter, are made by
    its first update."""
    return estimate.peak_memory_bytes - 2 / 3 * estimate.worst.optimizer_bytes
