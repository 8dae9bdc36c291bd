"""Published tables of machines and layouts that others had few of, predicted once before anybody looked at an error of them."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, allocated, rate_per_gpu
from benchmarks.accuracy.tables import Published

_A100_FLOPS_PER_S = 312e12


def _from_gpt_mfu(table: pd.DataFrame) -> pd.Series:
    """From MFU of an A100 with b s h (72 h + 12 s) FLOPs a layer and 6 b s h V of the head (arXiv:2411.05288, table 4)."""
    layers = table.n_layers * table.hidden * (72.0 * table.hidden + 12.0 * table.seq_len)
    tokens = table.micro_batch_size * table.n_microbatches * table.seq_len
    flops = tokens * (layers + 6.0 * table.hidden * table.vocab)
    return flops / (table.mfu_pct / 100 * _A100_FLOPS_PER_S * table.n_gpus)


KINDS = (
    Published(
        name="mindspeed_910b",
        source="MindSpeed-LLM (github.com/Ascend/MindSpeed-LLM, README.md of late 2024; layouts of its scripts, as in github.com/moguizhizi/MindSpeed-LLM)",
        note="LLaMA 7B to 70B, Qwen 0.5B to 110B, Mixtral 8x7B and others on 8 to 64 Ascend 910B (Atlas 900 A2 PODc), 2,048 to 32,768 tokens, with products that overlap tensor "
        "parallelism's collectives. Stages of unequal length (Qwen1.5 32B and 110B) are taken as equal. Which 910B is not said; blind it was the faster of two kinds.",
        seconds=rate_per_gpu,
    ),
    Published(
        name="vocabulary_pipelines",
        source="Yeung et al. 2024, Balancing pipeline parallelism with vocabulary parallelism (arXiv:2411.05288), tables 1 and 5, its baseline",
        note="GPTs of 4B to 21B with 32,000 to 256,000 words in 8 to 32 stages of 1F1B on A100, one sequence a microbatch, by a fork of Megatron-LM with FlashAttention. Steps "
        "follow from MFU, as the paper counts it; memory is the most tensors of a rank.",
        seconds=_from_gpt_mfu,
        num_bytes=lambda table: table.peak_allocated_gib * GIB,
        memory=allocated,
        group="n_gpus",
    ),
    Published(
        name="qwen3_moe_h200",
        source="Qwen3-30B-A3B experiments with torchtitan on 8 H200, December 2025",
        note="Tensor parallelism of 4 and experts shared by 2, 4 and 8 ranks, with and without torch.compile. Two rows are at 96 % of the memory, where the allocator tries again. "
        "That torch.compile has the loss too, as by default there, was left out blind.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.reserved_gib * GIB,
        group="ep",
    ),
    Published(
        name="mi100_pipeline",
        source="Two MI100 (github.com/Jack31098/llm_training_demo, README.md)",
        note="Qwen3 0.6B in two stages by DeepSpeed, sequences of 1,024 tokens, in fp32 and in bf16. That there are stages and no replicas, the tokens a step tell.",
        seconds=lambda table: table.step_ms / 1e3,
        num_bytes=lambda table: table.peak_reserved_gb * 1e9,
        group="precision",
    ),
    Published(
        name="torchtitan_async_tp",
        source="torchtitan (github.com/pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md), June 2025",
        note="Llama 3.1 8B on 64 and 70B on 256 H100 of 500 W, eight tensor-parallel ranks, with their collectives before products and under them, in bf16 and in 8 bits scaled by "
        "tensors and by rows.",
        seconds=rate_per_gpu,
        group="precision",
    ),
)  # fmt: skip

FIRST_KINDS = {
    "mindspeed_910b": First(time_mape=0.268, time_bias=-0.268, spearman=0.947),
    "vocabulary_pipelines": First(
        time_mape=0.057, time_bias=-0.054, spearman=0.989, memory_mape=0.035, memory_bias=-0.035
    ),
    "qwen3_moe_h200": First(
        time_mape=0.501, time_bias=-0.501, spearman=0.286, memory_mape=2.156, memory_bias=2.156
    ),
    "torchtitan_async_tp": First(time_mape=0.164, time_bias=-0.161, spearman=0.859),
    "mi100_pipeline": First(
        time_mape=0.497, time_bias=-0.497, spearman=0.917, memory_mape=0.140, memory_bias=0.102
    ),
}
