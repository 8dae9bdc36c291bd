"""Published tables that were predicted once before anybody looked at an error of theirs, and how far off that was."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import (
    GIB,
    MIB,
    allocated,
    before_first_update,
    from_recomputed_flops,
    rate,
    rate_per_gpu,
    seconds,
    with_context,
)
from benchmarks.accuracy.tables import Published


def _from_gpt_flops(table: pd.DataFrame) -> pd.Series:
    """From FLOP/s, counted as 6 for each parameter and token and 12 L h s^2 for attention (arXiv:2307.08691, section 4.2)."""
    parameters = 12 * table.n_layers * table.hidden**2 + (table.vocab + table.seq_len) * table.hidden
    per_token = 6.0 * parameters + 12.0 * table.n_layers * table.hidden * table.seq_len
    tokens = table.global_batch_seqs * table.seq_len
    return per_token * tokens / (table.tflops_per_gpu * 1e12 * table.n_gpus)


BLIND = (
    Published(
        name="internevo_a100",
        source="InternEvo (github.com/InternLM/InternEvo, doc/en/train_performance.md)",
        note="InternLM 7B on 8 to 1024 A100, four network cards of 100 Gbit/s a node, optimizer states sharded among all or in a "
        "node; memory of 3 to 16 A800, of which it is not said what counts (the whole device's is taken).",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.memory_gb * 1e9,
        memory=with_context,
        group="shard",
    ),
    Published(
        name="dlperf_v100",
        source="OneFlow's DLPerf (github.com/Oneflow-Inc/DLPerf, Megatron-LM/README.md and OneFlow/LanguageModeling/GPT)",
        note="GPTs of 117M to 3.6B on 1 to 32 V100 of 16 GB with one card of 100 Gbit/s a node, by Megatron-LM and by OneFlow, of "
        "May 2021. All is recomputed, as OneFlow's log says and the counted FLOPs of both. Memory is what nvidia-smi said.",
        seconds=lambda table: table.iteration_ms / 1e3,
        num_bytes=lambda table: table.nvidia_smi_mib * MIB,
        memory=with_context,
        group="framework",
    ),
    Published(
        name="pythia_a100",
        source="Biderman et al. 2023, Pythia (arXiv:2304.01373), table 5; github.com/EleutherAI/pythia, models/",
        note="70M to 12B on 32 to 256 A100 of 40 GB by GPT-NeoX. Steps follow from GPU hours, which are there those of 143,000 "
        "logged iterations. Attention and feed-forward blocks side by side are taken for one after the other.",
        seconds=seconds,
    ),
    Published(
        name="papers_one_layout",
        source="Smith et al. 2022, MT-NLG (arXiv:2201.11990); Wu et al. 2023, BloombergGPT (arXiv:2303.17564); Zeng et al. 2022, "
        "GLM-130B (arXiv:2210.02414); DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437)",
        note="Papers that tell one layout each. Micro-batches are not given (of GLM-130B the fastest is taken); GLM-130B's step "
        "follows from its MFU, DeepSeek-V3's from GPU hours for a trillion tokens.",
        seconds=seconds,
    ),
    Published(
        name="rtx4090_megatron",
        source="Infinigence's guide to training on RTX 4090 (August 2025, aurora-wandb.infini-ai.com)",
        note="Llama 2 7B on 8 and 16 RTX 4090 of 48 GB by Megatron Core. Sequence and micro-batch follow from the published FLOP/s and "
        "memory, which is what the first stage reserved in the first iteration, before Adam had moments: what each rank had allocated "
        "then and held behind it tells so (its blind prediction was of later ones).",
        seconds=seconds,
        num_bytes=lambda table: table.peak_reserved_mib * MIB,
        memory=before_first_update,
    ),
    Published(
        name="torchao_float8",
        source="torchao (github.com/pytorch/ao, torchao/float8/README.md)",
        note="torchtitan's Llama 3 8B on 8 H100 and on 8 MI300X, bf16 and 8 bits. Its H100 may be those of 500 W of the table torchtitan: "
        "it is not said. Memory is said to be in GB and is in GiB: the script it is from (benchmarks/float8/training) reads torchtitan's "
        "logs, which tell GiB. Its blind prediction was compared with GB, without the rows of float8 by rows, and had torch.compile of MI300X's torchtitan of August 2025 leave the loss out.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.reserved_gb * GIB,
        group="gpu",
    ),
    Published(
        name="primus_mi355x",
        source="AMD Primus-Turbo (github.com/AMD-AGI/Primus-Turbo, pull requests 557 and 558)",
        note="Qwen3 30B-A3B on 8 MI355X by Primus's Megatron, experts on all, routing even, exchanges by DeepEP (left out blind). The two of 8 bits differ in a fused activation. "
        "Memory is the device's.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.device_memory_gb_used * 1e9,
        memory=with_context,
        group="precision",
    ),
    Published(
        name="flashattention2_a100",
        source="Dao 2023 (arXiv:2307.08691), table 1",
        note="GPTs of 1.3B and 2.7B on 8 A100 without FlashAttention, with its first and with its second generation. Batches are not given: "
        "of a million tokens, by the fastest micro-batch that fits.",
        seconds=_from_gpt_flops,
        group="attention",
    ),
    Published(
        name="gpt2xl_lightning",
        source="Colossal-AI (github.com/hpcaitech/ColossalAI-Pytorch-lightning, benchmark/gpt)",
        note="Hugging Face's GPT-2 XL on 4 A100 of 40 GB under Lightning, of five steps an epoch. Memory is the peak allocated. "
        "Its loss is of 16-bit logits but under autocast, as its script has it; blind it was in fp32.",
        seconds=lambda table: table.global_batch_seqs / table.samples_per_s,
        num_bytes=lambda table: table.peak_allocated_mb * MIB,
        memory=allocated,
        group="framework",
    ),
    Published(
        name="torchtune_offload",
        source="torchtune (github.com/pytorch/torchtune, README.md of September 2024)",
        note="Llama 3.1 70B whole on 8 A100, states on the host, and 8B on one RTX 4090, by a paged optimizer of 8 bits inside the backward. Rows of LoRA are left out, and one of "
        "an A6000 that is faster than its card with recomputation.",
        seconds=rate,
        num_bytes=lambda table: table.memory_gib * GIB,
        memory=allocated,
    ),
    Published(
        name="vtrain_multi_a100",
        source="vTrain (arXiv:2312.12391; github.com/VIA-Research/vTrain, data/ground_truth_multi.csv)",
        note="Megatron-DeepSpeed on 64 to 512 A100, GPTs of 3.6B to 175B, full recomputation. Its steps on one node, of other models and "
        "layouts, are among those that were fitted to.",
        seconds=lambda table: table.iteration_ms / 1e3,
        group="tp",
    ),
    Published(
        name="megatron_zero3_a100",
        source="Narayanan et al. 2021 (arXiv:2104.04473), table 2",
        note="GPTs of 175B and 530B on 384 to 2240 A100: DeepSpeed's ZeRO stage 3 without other parallelism, and Megatron-LM's tensor and "
        "pipeline parallelism (whether it is interleaved is not said). Steps follow from the published FLOP/s, which count recomputation.",
        seconds=from_recomputed_flops,
        group="zero_stage",
    ),
    Published(
        name="flagperf",
        source="FlagPerf (github.com/FlagOpen/FlagPerf, training/nvidia)",
        note="Llama 2 and 3, Baichuan 2, ChatGLM 3 on A100, A800, H800 and H100 by Megatron Core, FlagScale, Megatron-DeepSpeed and DeepSpeed. "
        "What is recomputed, shared out and reduced is as its scripts have it. Memory is the device's, in whole GiB.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.device_memory_gib_used * GIB,
        memory=with_context,
        group="framework",
    ),
    Published(
        name="paddle_llama_a100",
        source="FlagPerf (github.com/FlagOpen/FlagPerf, training/nvidia/llama1_7B-paddle)",
        note="LLaMA 7B on 8 A100 of 80 and 40 GB by PaddlePaddle, sharded in stages 1 and 2, tensor and pipeline parallelism. Steps of the 40 GB cards are "
        "taken to have 2M tokens, as said, and not the 4M of the number of microbatches. Which memory is not said: the whole device's is taken.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.memory_gb * 1e9,
        memory=with_context,
        group="gpu",
    ),
    Published(
        name="universal_llm_trainer",
        source="Universal LLM trainer (github.com/ljm565/universal-LLM-trainer, its GPU test)",
        note="Llama 3.1 8B and Phi-3 mini whole on one H100 and one A100, all in bf16, by Hugging Face's classes. Rows of LoRA and of states on the host (whose "
        "step is not defined) are left out. Which memory is not said: the peak allocated is taken.",
        seconds=seconds,
        num_bytes=lambda table: table.memory_gib * GIB,
        memory=allocated,
    ),
)

# Of the code before the commit that brought these tables.
FIRST = {
    "internevo_a100": First(time_mape=1.025, time_bias=0.993, spearman=0.274, memory_mape=0.287, memory_bias=-0.287),
    "dlperf_v100": First(time_mape=0.233, time_bias=-0.098, spearman=0.938, memory_mape=0.276, memory_bias=0.02),
    "pythia_a100": First(time_mape=0.316, time_bias=-0.316, spearman=0.952),
    "papers_one_layout": First(time_mape=0.27, time_bias=-0.153, spearman=0.943),
    "rtx4090_megatron": First(time_mape=0.196, time_bias=0.196, memory_mape=0.255, memory_bias=0.255),
    "torchao_float8": First(time_mape=0.333, time_bias=-0.333, spearman=0.6, memory_mape=0.21, memory_bias=0.21),
    "primus_mi355x": First(time_mape=0.16, time_bias=0.16, spearman=0.866, memory_mape=0.512, memory_bias=0.512),
    "flashattention2_a100": First(time_mape=0.11, time_bias=-0.074, spearman=0.958),
    "gpt2xl_lightning": First(time_mape=0.503, time_bias=-0.503, spearman=0.866, memory_mape=0.466, memory_bias=0.466),
    "torchtune_offload": First(time_mape=0.195, time_bias=-0.195, memory_mape=1.4, memory_bias=1.4),
    "vtrain_multi_a100": First(time_mape=0.079, time_bias=-0.023, spearman=0.949),
    "megatron_zero3_a100": First(time_mape=0.286, time_bias=-0.286, spearman=0.778),
    "flagperf": First(time_mape=0.192, time_bias=0.007, spearman=0.956, memory_mape=0.159, memory_bias=-0.15),
    "paddle_llama_a100": First(time_mape=0.24, time_bias=-0.24, spearman=0.952, memory_mape=0.099, memory_bias=-0.035),
    "universal_llm_trainer": First(time_mape=0.497, time_bias=-0.497, spearman=1.0, memory_mape=0.276, memory_bias=0.276),
}  # fmt: skip
