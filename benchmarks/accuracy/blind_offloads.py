"""Published tables of offloading, older machines and what is seldom tabled, predicted once before anybody looked at an error."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import (
    GIB,
    MIB,
    allocated,
    before_first_update,
    rate,
    seconds,
    with_context,
)
from benchmarks.accuracy.tables import Published


def _seconds_of_samples(table: pd.DataFrame) -> pd.Series:
    sequences = (
        table.global_batch_seqs
        if "global_batch_seqs" in table
        else table.micro_batch_size * table.grad_accum * table.dp
    )
    return sequences / table.samples_per_s


OFFLOADS = (
    Published(
        name="hf_ulysses_h100",
        source="Hugging Face's post on Ulysses (github.com/huggingface/blog, ulysses-sp.md of March 2026)",
        note="Qwen3 4B by TRL and DeepSpeed's ZeRO stage 3 on one H100, and on four that share sequences of 8k to 96k tokens by heads, 128k of which ran out of memory. Steps take 26 s "
        "on one card and on four, whatever they have to compute, and peaks have 12 B of each of a rank's parameters more than predicted: as if the optimizer, which the page says is on the "
        "host, were not there. It is taken at its word.",
        seconds=rate,
        num_bytes=lambda table: (table.memory_gb * 1e9).where(table.status == "ok"),
        memory=with_context,
    ),
    Published(
        name="alpa_zero_a100",
        source="Alpa's notes on DeepSpeed (github.com/alpa-projects/alpa, benchmark/zero.md of 2021)",
        note="GPT of 345M to 5.8B by DeepSpeed's Megatron-LM on 8 A100 of 40 GB: replicas or tensor parallelism, ZeRO stages 0 to 3, with and without the optimizer on the host, as many sequences as fit. Sequences of "
        "1,024 tokens and full recomputation are those of its script. Memory is what nvidia-smi shows of the fullest card.",
        seconds=lambda table: table.iteration_ms / 1e3,
        num_bytes=lambda table: table.nvidia_smi_mib * MIB,
        memory=with_context,
        group="zero_stage",
    ),
    Published(
        name="libai_v100",
        source="OneFlow's LiBai (github.com/Oneflow-Inc/libai, docs/source/tutorials/get_started/Benchmark.md of 2022)",
        note="BERT large and GPT-2 medium of 24 and 48 layers on 1 to 32 cards, data, tensor and pipeline parallelism and their products, by Megatron-LM and by LiBai. Which cards is not said: what one of them computes, and the largest "
        "micro-batches, are a V100's of 32 GB.",
        seconds=_seconds_of_samples,
        group="framework",
    ),
    Published(
        name="deepspeed_autotuning_v100",
        source="DeepSpeedExamples (github.com/microsoft/DeepSpeedExamples, training/autotuning/hf/README.md of 2021)",
        note="Hugging Face's BERT (fp32, 128 tokens, MNLI) and GPT-2 (fp16, 1,024 tokens) on the 16 V100 of a DGX-2, by DDP and by DeepSpeed at the micro-batches that its tuner tried. Precisions follow from the rates: its scripts name none. "
        "BERT's head of three classes is a vocabulary of 128 here, and was BERT's own in the blind prediction. GPT-2 takes 6 ms a layer longer than predicted, whatever the batch.",
        seconds=_seconds_of_samples,
        group="model",
    ),
    Published(
        name="nanotron_8b_h100",
        source="A comparison of FSDP and nanotron (moussakam.github.io, September 2024)",
        note="Llama 3.1 8B, 4,096 tokens, on 4 and 8 nodes of four H100: nanotron's tensor, pipeline and data parallelism, and LLaMA-Factory's FSDP. Their network is not told; what LLaMA-Factory recomputes neither. "
        "Ranks of tensor parallelism on two nodes are predicted too slow.",
        seconds=rate,
        group="framework",
    ),
    Published(
        name="rtx4090_24gb",
        source="Infinigence's guide to training on RTX 4090 (August 2025, aurora-wandb.infini-ai.com), its part on cards of 24 GB",
        note="Half of Llama 2 7B on 8 and 16 RTX 4090 by Megatron Core, as table rtx4090_megatron, whose memory it is too.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_reserved_mib * MIB,
        memory=before_first_update,
        group="n_gpus",
    ),
    Published(
        name="vertex_lora_a100",
        source="Google's report on OpenLLaMA 7B (github.com/GoogleCloudPlatform/vertex-ai-samples, 2023)",
        note="LoRA in 16 and QLoRA in 4 bits, rank 16, on one A100 of 40 GB, by maximal length of two sequences; one ran out of memory. That Hugging Face's class of 2023 had its scores in memory was not entered blind. Its rates are left out, for samples are "
        "shorter than the maximum.",
        seconds=lambda table: pd.Series(float("nan"), index=table.index),
        num_bytes=lambda table: (table.memory_gb * 1e9).where(table.status == "ok"),
        memory=with_context,
        group="peft",
    ),
    Published(
        name="habana_gaudi2",
        source="Optimum Habana's baselines (github.com/huggingface/optimum-habana, tests/baselines of 2023 to 2025)",
        note="BERT large, GPT-2, GPT-NeoX 20B, and LoRA of LLaMA 7B and Falcon 40B on one and eight Gaudi 2. BERT's small heads are a vocabulary of 128 here, and were BERT's own in the blind prediction, which had 1,024 tokens in place "
        "of the script's 512 of one of LLaMA's rows. Memory is the peak allocated.",
        seconds=_seconds_of_samples,
        num_bytes=lambda table: table.peak_allocated_gib * GIB,
        memory=allocated,
        group="model",
    ),
    Published(
        name="pangu_deepspeed",
        source="An experiment with DeepSpeed's stages (github.com/sunzeyeah/RLHF, src/resources/config/deepspeed/Experiment.md of 2023)",
        note="PanGu 350M and 2.6B, 512 tokens, on one and three V100 of 16 GB and one A100: DDP, ZeRO stages 0 to 3, with the optimizer and the parameters on the host. That eight microbatches make an iteration follows from the "
        "epochs' times. Stage 3 takes 5 to 20 times as long as predicted there, and fp32 on the A100 as long as 16 bits. Memory is what nvidia-smi shows.",
        seconds=seconds,
        num_bytes=lambda table: table.nvidia_smi_mib * MIB,
        memory=with_context,
        group="gpu",
    ),
    Published(
        name="mingpt_a100",
        source="minGPT by Lightning (github.com/SeanNaren/minGPT, branch deepspeed, README of 2021)",
        note="GPT of 1.7B and 20B, one sequence a rank, on 8 A100 of 40 GB: DDP, ZeRO stage 3, and with optimizer and parameters on the host. 128 tokens of characters are its script's defaults. Steps are epochs' "
        "times over their batches. Memory is the peak allocated.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_allocated_mib * MIB,
        memory=allocated,
        group="strategy",
    ),
)

FIRST_OFFLOADS = {
    "hf_ulysses_h100": First(
        time_mape=0.533, time_bias=-0.376, spearman=0.8, memory_mape=0.345, memory_bias=-0.345
    ),
    "alpa_zero_a100": First(
        time_mape=0.247, time_bias=-0.230, spearman=0.976, memory_mape=0.197, memory_bias=-0.161
    ),
    "libai_v100": First(time_mape=0.132, time_bias=-0.090, spearman=0.954),
    "deepspeed_autotuning_v100": First(time_mape=0.270, time_bias=-0.091, spearman=0.918),
    "nanotron_8b_h100": First(time_mape=0.237, time_bias=0.111, spearman=0.929),
    "rtx4090_24gb": First(
        time_mape=0.117, time_bias=0.117, spearman=1.0, memory_mape=0.263, memory_bias=0.263
    ),
    "vertex_lora_a100": First(memory_mape=0.133, memory_bias=-0.086),
    "habana_gaudi2": First(
        time_mape=0.324, time_bias=0.063, spearman=0.927, memory_mape=0.206, memory_bias=-0.206
    ),
    "pangu_deepspeed": First(
        time_mape=0.732, time_bias=-0.442, spearman=0.719, memory_mape=0.253, memory_bias=0.054
    ),
    "mingpt_a100": First(
        time_mape=0.549, time_bias=-0.462, spearman=0.8, memory_mape=0.212, memory_bias=-0.057
    ),
}
