"""Published results of trainers' own benchmark suites, predicted once before anybody looked at an error of them."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, MIB, with_context
from benchmarks.accuracy.tables import Published
from memadvisor.architectures.load import load_architecture


def _of_replicas(table: pd.DataFrame) -> pd.Series:
    """Every accelerator is a replica; the rate is that of all together."""
    tokens = table.micro_batch_size * table.grad_accum * table.n_gpus * table.seq_len
    return tokens / table.tokens_per_s


def _of_batches(table: pd.DataFrame) -> pd.Series:
    """A step as it is told, or of its tokens; an encoder-decoder's are counted of the source alone."""
    return table.step_time_s.fillna(table.global_batch_seqs * table.seq_len / table.tokens_per_s)


def _from_causal_flops(table: pd.DataFrame) -> pd.Series:
    """A step as it is told, or from FLOP/s of Megatron Core's count of 2025: causal attention halved, the embedding left out."""
    found = []
    for row in table.itertuples():
        model = load_architecture(str(row.model))
        per_token = 6.0 * (model.active_parameters() - model.embedding_parameters())
        per_token += 6.0 * model.n_layers * model.n_heads * model.head_dim * row.seq_len
        tokens = row.global_batch_seqs * row.seq_len
        found.append(per_token * tokens / (row.tflops_per_gpu * 1e12 * row.n_gpus))
    return table.step_time_s.fillna(pd.Series(found, index=table.index))


SUITES = (
    Published(
        name="prime_rl",
        source="prime-rl (github.com/PrimeIntellect-ai/prime-rl, its automated benchmark of February 2026)",
        note="Qwen3 0.6B to 235B-A22B, Llama 3.1 and 3.2, and INTELLECT-3 (GLM 4.5 Air's shape) under FSDP2 on one and eight H100, H200 and B200 and on RTX A6000, whole and with adapters, "
        "8,192 to 65,536 tokens, with torch.compile, FlashAttention 2 to 4, two microbatches a step, parameters in fp32, frozen ones too. Adapters are those of four runs, of which one is predicted. "
        "Whole models under reinforcement learning write their weights for the engines that sample after each step, so that their steps are not compared. Memory is what torch reserved.",
        seconds=_of_replicas,
        num_bytes=lambda table: table.reserved_gib * GIB,
        group="gpu",
    ),
    Published(
        name="surogate_lora",
        source="Surogate's comparison with Unsloth (github.com/invergent-ai/surogate, benchmarks/speed.md)",
        note="LoRA of rank 16 beside all matrices of Qwen3 0.6B to 32B, two sequences of 2,048 tokens, on RTX 5090, H100, H200 and B200 by Unsloth (in bf16 and on 4 bits) and by Surogate (bf16, FP8, NVFP4), "
        "and on four RTX 5090. What Surogate recomputes is not said; bases that it quantises itself, and experts, are left out.",
        seconds=_of_replicas,
        group="framework",
    ),
    Published(
        name="megatron_moe_zoo",
        source="Megatron's zoo of models with experts (github.com/yanring/Megatron-MoE-ModelZoo, best_practice/qwen3/readme.md)",
        note="Qwen3 235B-A22B and Qwen3-Next 80B-A3B by Megatron Core on 128 and 256 H100, GB200 and GB300, experts on 8 and 32 ranks, with pipelines and under Megatron's FSDP. Rows that recompute "
        "whole layers of experts or have activations of some modules on the host, which the columns cannot say, are left out.",
        seconds=_from_causal_flops,
        group="gpu",
    ),
    Published(
        name="nemo_launcher_a100",
        source="NVIDIA NeMo Framework Launcher (github.com/NVIDIA/NeMo-Framework-Launcher, README.md, section 7, of containers of 2022 and 2023)",
        note="GPT 5B and 175B, T5 and mT5 3B, BERT 4B, 20B and 100B on 8 to 1,024 A100 of DGX SuperPODs. Shapes, batches, degrees and what is recomputed are those of its configurations; a batch is "
        "taken to be the same on any number of nodes. BERT's steps by its data loader of 2023 (LDDL) are those without tokens a second; Attention is in memory but for GPT 175B's, whose configuration alone has Transformer Engine; that of GPT 5B was taken to be fused, and gradients of T5 and BERT to be reduced under the backward, which their configurations do not have, blind.",
        seconds=_of_batches,
    ),
    Published(
        name="megatron_bert_a100",
        source="Logs of Megatron-LM on ThetaGPU (github.com/xduan7/scalable-transformer, docs/megatron_bert_345m.md of 2021)",
        note="BERT of 345M on 1 to 128 A100 of 40 GB, with tensor and pipeline parallelism from 8 on. A run on 16 whose layers took ten times as long is left out, as are those by "
        "DeepSpeed, whose batch is not said. Memory is the most that nvidia-smi showed.",
        seconds=lambda table: table.ms_per_sample / 1e3 * table.global_batch_seqs,
        num_bytes=lambda table: table.nvidia_smi_mib * MIB,
        memory=with_context,
    ),
)

FIRST_SUITES = {
    "prime_rl": First(
        time_mape=0.339, time_bias=-0.326, spearman=0.939, memory_mape=0.107, memory_bias=-0.102
    ),
    "surogate_lora": First(time_mape=0.213, time_bias=0.058, spearman=0.944),
    "megatron_moe_zoo": First(time_mape=0.315, time_bias=0.281, spearman=0.703),
    "nemo_launcher_a100": First(time_mape=0.255, time_bias=-0.247, spearman=0.996),
    "megatron_bert_a100": First(
        time_mape=0.262, time_bias=-0.255, spearman=0.9, memory_mape=0.241, memory_bias=0.18
    ),
}
