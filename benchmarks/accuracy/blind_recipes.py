"""Published steps of vendors' own recipes and of JAX, predicted once before anybody looked at an error of them."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import allocated, from_flops, rate_per_gpu, seconds
from benchmarks.accuracy.tables import Published


def _from_sample_rate(table: pd.DataFrame) -> pd.Series:
    return table.global_batch_seqs / table.samples_per_s


RECIPES = (
    Published(
        name="dgxc_nemo",
        source="NVIDIA DGX Cloud benchmarking (github.com/NVIDIA/dgxc-benchmarking, READMEs of its recipes of 2024 and 2025)",
        note="GPT-3 175B, Llama 3.1 8B to 405B, Nemotron-4 15B and 340B by NeMo on 8 to 2,304 H100 and 128 to 512 GB200, bf16 and FP8. "
        "Fewer than 576 accelerators have 7 to 42 of the 405B model's layers; its vocabulary is GPT-2's, padded.",
        seconds=seconds,
        group="model",
    ),
    Published(
        name="dgxc_grok1",
        source="NVIDIA DGX Cloud benchmarking (github.com/NVIDIA/dgxc-benchmarking, grok1)",
        note="Grok-1 (8 experts, 2 of a token, every expert padded to the same number of tokens, which was seen after the blind prediction) by NeMo on 8 to 2,048 H100, bf16 and FP8; fewer than 512 "
        "accelerators have 2 to 32 of its 64 layers.",
        seconds=seconds,
        group="precision",
    ),
    Published(
        name="dgxc_finetuning",
        source="NVIDIA DGX Cloud benchmarking (github.com/NVIDIA/dgxc-benchmarking, ft_llama3)",
        note="Llama 3 8B and 70B by NeMo on 8 to 32 H100, all parameters and LoRA, bf16 and FP8. Ranks and matrices with adapters are NeMo's "
        "recipes'.",
        seconds=seconds,
        group="peft",
    ),
    Published(
        name="jax_fsdp",
        source="NVIDIA DGX Cloud benchmarking (github.com/NVIDIA/dgxc-benchmarking, maxtext and paxml) and JAX-Toolbox (github.com/NVIDIA/JAX-Toolbox, "
        "rosetta/projects/pax)",
        note="MaxText's Llama 2 70B and Paxml's GPT-3 126M to 175B, sharded as by FSDP, on 16 to 2,048 H100 and 64 and 256 A100. What MaxText keeps "
        "(queries, keys and values) is taken for nothing, and Paxml's results of products for torchtitan's choice of them.",
        seconds=seconds,
        group="framework",
    ),
    Published(
        name="jax_vit",
        source="JAX-Toolbox (github.com/NVIDIA/JAX-Toolbox, rosetta/projects/vit)",
        note="Vision transformers ViT-B/16 and ViT-G/14, data parallel and with 4 and 8 tensor ranks, on 8 to 64 A100 and 8 H100: encoders of 197 "
        "and 257 tokens, with a head over 1000 classes of each token where theirs has one of each image. "
        "That a tenth of what comes out of its blocks is dropped is in its configurations (pretrain.gin); the blind prediction had none.",
        seconds=_from_sample_rate,
        group="model",
    ),
    Published(
        name="deepspeed_llama_a800",
        source="Benchmark of LLaMA-7B under DeepSpeed (gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a)",
        note="LLaMA 7B on 8 A800, 4096 tokens, ZeRO stages 2 and 3, with and without recomputation and states on the host, by Hugging Face's class. The "
        "unit of its throughput is not given (sequences a second follow from the accelerators' peak), nor which options of ZeRO++ (qwZ and qgZ are taken: hpZ is not for parameters on the host). "
        "Memory is the peak allocated.",
        seconds=_from_sample_rate,
        num_bytes=lambda table: table.peak_allocated_gb * 1e9,
        memory=allocated,
        group="zero_stage",
    ),
    Published(
        name="nemo_long_h100",
        source="NVIDIA NeMo 24.03 (github.com/NVIDIA/NeMo, docs/source/performance/performance_long_sequence.md)",
        note="Llama 2 7B in FP8, 4,096 to 1,048,576 tokens, on 4 to 1,024 H100, context parallel from 32,768 tokens on. The batch (4M tokens are taken), the "
        "micro-batch (1 is taken) and what is recomputed (nothing is taken) are not given. Steps follow from FLOP/s that count causal attention in full, "
        "as that page's other figures do.",
        seconds=from_flops,
        group="cp",
    ),
    Published(
        name="nemo_blackwell",
        source="NVIDIA NeMo 25.02, 25.04 and 25.07, performance summaries (docs.nvidia.com/nemo-framework/user-guide, performance)",
        note="GPT-3 175B, Llama 3 and 4, Nemotron-4, Mixtral on 8 to 512 B200 and GB200, FP8 with scales of each tensor. What is recomputed (nothing is taken), in "
        "CUDA graphs or overlapped is not given. Mixtral 8x22B's micro-batch and batch stand in each other's columns there. Figures in brackets, whose "
        "meaning is not said, are left out.",
        seconds=rate_per_gpu,
        group="release",
    ),
)

FIRST_RECIPES = {
    "dgxc_nemo": First(time_mape=0.089, time_bias=0.049, spearman=0.991),
    "dgxc_grok1": First(time_mape=0.15, time_bias=0.15, spearman=0.911),
    "dgxc_finetuning": First(time_mape=0.189, time_bias=0.18, spearman=0.956),
    "jax_fsdp": First(time_mape=0.201, time_bias=0.109, spearman=0.925),
    "jax_vit": First(time_mape=0.362, time_bias=-0.362, spearman=0.929),
    "deepspeed_llama_a800": First(
        time_mape=0.476, time_bias=-0.476, spearman=0.873, memory_mape=0.226, memory_bias=0.125
    ),
    "nemo_long_h100": First(time_mape=0.163, time_bias=-0.163, spearman=0.983),
    "nemo_blackwell": First(time_mape=0.092, time_bias=0.015, spearman=0.984),
}
