"""Sweeps of layouts and batches in public repositories, some with rows that ran out of memory, predicted once before any error was known."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.blind_logs import from_megatron_flops
from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, allocated, rate_per_gpu, seconds, with_context
from benchmarks.accuracy.tables import Published


def _milliseconds(table: pd.DataFrame) -> pd.Series:
    return table.step_ms / 1e3


def _from_tflops(table: pd.DataFrame) -> pd.Series:
    whole = table.assign(head_dim=table.hidden / table.n_heads)
    return from_megatron_flops(whole, table.tflops_per_gpu * 1e12)


SWEEPS = (
    Published(
        name="lumen_mi350x",
        source="Lumen's comparison of MXFP4 with BF16 and FP8 (its training step-time benchmark of August 2026)",
        note="Llama 2 7B, Llama 3.1 8B and Qwen3 8B by Megatron-LM with Lumen's layers on 8 MI350X, in bf16, FP8 and 4 bits; memory is the device's.",
        seconds=_milliseconds,
        num_bytes=lambda table: table.device_memory_gib_used * GIB,
        memory=with_context,
        group="precision",
    ),
    Published(
        name="megatron_mi355x",
        source="A sweep of Megatron-LM on one node of MI355X (summary of June 2026 of a gfx950 image, in a public repository on GitHub)",
        note="One dense model of 20B on one to eight MI355X, micro-batches of 2 to 12, all, some or nothing recomputed, bf16 and FP8. Steps follow from Megatron's FLOP/s, memory "
        "from the share of the device's. Rows of five to seven cards, where RCCL falls off a cliff, are left out, and times of those from an older image.",
        seconds=_from_tflops,
        num_bytes=lambda table: table.device_memory_gib_used * GIB,
        memory=with_context,
        group="recompute",
    ),
    Published(
        name="enoki_h100",
        source="Batch sizes of GPTs of 28 to 48 heads (results of scripts/benchmark_batch.sh of a public repository on GitHub)",
        note="GPTs of 1 to 5B, layers and width in proportion to heads, on 4 H100 by FSDP and by four tensor-parallel ranks, operator by operator, with an optimizer of Python's (which is not "
        "known: AdamW is taken). That its tensor-parallel ranks keep what sequence parallelism would share was left out blind.",
        seconds=_milliseconds,
        num_bytes=lambda table: table.peak_allocated_gib * GIB,
        memory=allocated,
        group="tp",
    ),
    Published(
        name="megatron_32b_gh200",
        source="An ablation of a model of 32B on Alps (lsaie-ss26-gipfelsturm, April 2026, a public repository on GitHub)",
        note="Qwen2.5's shape by Megatron Core on 4 to 16 GH200, bf16 and FP8; five of ten rows ran out of memory. Moments in 16 bits, which the columns cannot say, are why four that ran are said not to fit.",
        seconds=rate_per_gpu,
        group="precision",
    ),
    Published(
        name="paddle_zb_3090",
        source="A weekly report of PaddlePaddle's zero-bubble pipeline (github.com/PFCCLab/Camp, April 2024)",
        note="Four layers of Llama 7B's shape in fp32 on four RTX 3090, 1F1B and ZB-H1.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_allocated_mb * 1e6,
        memory=allocated,
    ),
    Published(
        name="scaletorch_910",
        source="ScaleTorch (github.com/jianzhnie/ScaleTorch, README.md)",
        note="Qwen3 0.6B to 4B of Hugging Face's classes on one Ascend 910 of 64 GB, sequences of 2k to 16k; states in bf16. The column of recomputation and the card's were not read blind.",
        seconds=lambda table: table.micro_batch_size * table.seq_len / table.tokens_per_s_per_gpu,
        num_bytes=lambda table: table.memory_gb * 1e9,
        memory=allocated,
        group="recompute",
    ),
    Published(
        name="swift_h100",
        source="Megatron and FSDP2 by ms-swift (github.com/fyh2001/megatron-sft-recipes, docs)",
        note="Qwen3.5 9B and Qwen2.5 14B on 8 H100. The page's FSDP2 rows of 9B recompute, as ms-swift does unless it is told otherwise, which was left out blind; memory of its 14B under Megatron, "
        "which is below the states', is left out.",
        seconds=seconds,
        num_bytes=lambda table: table.memory_gib * GIB,
        group="framework",
    ),
)

FIRST_SWEEPS = {
    "lumen_mi350x": First(
        time_mape=0.239, time_bias=-0.239, spearman=0.95, memory_mape=0.056, memory_bias=-0.056
    ),
    "megatron_mi355x": First(
        time_mape=0.366, time_bias=-0.366, spearman=0.997, memory_mape=0.061, memory_bias=-0.061
    ),
    "enoki_h100": First(
        time_mape=0.663, time_bias=-0.663, spearman=0.908, memory_mape=0.28, memory_bias=-0.28
    ),
    "megatron_32b_gh200": First(time_mape=0.123, time_bias=-0.123, spearman=0.9),
    "paddle_zb_3090": First(),
    "scaletorch_910": First(
        time_mape=0.434, time_bias=-0.434, spearman=0.991, memory_mape=0.756, memory_bias=0.756
    ),
    "swift_h100": First(
        time_mape=0.198, time_bias=-0.138, spearman=0.7, memory_mape=0.908, memory_bias=0.897
    ),
}
