"""Published steps on accelerators that few other tables have, predicted once before anybody looked at an error of them."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, MIB, allocated, seconds
from benchmarks.accuracy.tables import Published

_PEAK_FLOPS_PER_S = {
    "v4": 275e12,
    "v5e": 197e12,
    "v5p": 459e12,
}  # of the sheets, which the published MFU is of


def _from_mfu(table: pd.DataFrame) -> pd.Series:
    """Steps of MaxText's models: 6 FLOPs of each parameter but the table of tokens' and 12 L n d s of attention, of a token."""
    attention = 4 * table.hidden * table.n_heads * table.head_dim
    matrices = 3 - (table.gated_mlp.astype(str).str.lower() == "false").astype(int)
    layer = attention + matrices * table.hidden * table.ffn
    per_token = 6.0 * (table.n_layers * layer + table.vocab * table.hidden)
    per_token += 12.0 * table.n_layers * table.n_heads * table.head_dim * table.max_target_length
    peak = table.Hardware.str.extract(r"(v\d\w?)-")[0].map(_PEAK_FLOPS_PER_S)
    tokens = table.global_batch_size * table.max_target_length
    return per_token * tokens / (table.mfu_pct / 100 * peak * table.n_gpus)


def _from_sequences(table: pd.DataFrame) -> pd.Series:
    return table["Batch size / GPU"] * table.GPUs / table.sequences_per_s


MACHINES = (
    Published(
        name="maxtext_tpu",
        source="MaxText (github.com/AI-Hypercomputer/maxtext, MaxText/configs/v4, v5e and v5p, README.md)",
        note="Models of 16B to 1024B on 64 to 8,192 TPU v4, v5e and v5p in up to 32 slices: sharded within a slice, copied among slices. Shapes, batches and "
        "what is recomputed are those of its scripts; the models of v4, of 2023, have two matrices and heads 256 wide, which make 22 and 52 billion. Steps follow from the published MFU.",
        seconds=_from_mfu,
        group="Hardware",
    ),
    Published(
        name="tpu_recipes",
        source="Google's recipes (github.com/AI-Hypercomputer/tpu-recipes, training/trillium and training/ironwood)",
        note="Llama 2 and 3.1, GPT-3, GPT-OSS, Qwen3, DeepSeek-V3 on 8 to 512 TPU v6e and 64 to 256 TPU7x by MaxText, sharded over all. What it keeps of a layer "
        "(inputs, queries, keys and values, on the device or on the host) is taken for the inputs alone.",
        seconds=seconds,
        group="model",
    ),
    Published(
        name="pai_rapidformer_v100",
        source="Alibaba Cloud PAI, Rapidformer benchmark (help.aliyun.com/document_detail/406382.htm)",
        note="BERT base by Hugging Face and a GPT of 1.3B by Megatron-LM on 4 GPUs of 32 GB, which are taken for V100. Which memory is not said: the peak "
        "allocated is taken. A row of 16 ranks on 4 GPUs, and those of Fairscale, are left out.",
        seconds=lambda table: table["global-batch-size"] / table.samples_per_s,
        num_bytes=lambda table: table.peak_memory_mb * MIB,
        memory=allocated,
        group="framework",
    ),
    Published(
        name="gaudi2_llama",
        source="Intel, model performance of Gaudi 2, SynapseAI 1.18 and 1.19 (intel.com/content/www/us/en/developer/platform/gaudi)",
        note="Llama 2 and 3.1, 7B to 70B, on 8 to 64 Gaudi 2 in FP8. Degrees and micro-batches are of its scripts (github.com/HabanaAI/Megatron-DeepSpeed, "
        "README.md); that Llama 2 70B, told there for 32, has two replicas on 64 is taken.",
        seconds=lambda table: table["Batch Size"] * table["Sequence Length"] / table.tokens_per_s,
        group="Model",
    ),
    Published(
        name="bert_v100",
        source="NVIDIA DeepLearningExamples (github.com/NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md of 2020)",
        note="Pre-training of BERT large on 1 to 128 V100 of DGX-1 and DGX-2, fp32 and fp16, 128 and 512 tokens. Steps of DGX-2H and of fine-tuning are left out. "
        "Its loss is of the masked tokens alone, where here it is of each.",
        seconds=_from_sequences,
        group="precision",
    ),
    Published(
        name="lumen_mi325x",
        source="Lumen (its examples of Llama 2 and 3.1, README.md)",
        note="Llama 2 7B and 3.1 8B on 8 MI325X by Megatron with Transformer Engine's and Lumen's kernels, bf16 and FP8. What is recomputed (nothing is taken) is not "
        "given. Memory is the peak allocated.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_allocated_gb * 1e9,
        memory=allocated,
        group="Precision",
    ),
    Published(
        name="swift_qwen3_l40s",
        source="A recipe of ms-swift for Qwen3 (README.md, measured throughput of July 2026)",
        note="All parameters of Qwen3 1.7B and 4B, packs of 65,536 tokens, on 8 L40S by FSDP. The 2B model is the text part of Qwen3-VL 2B, which has the shape of Qwen3 "
        "1.7B. Memory is the peak reserved.",
        seconds=seconds,
        num_bytes=lambda table: table.reserved_gib * GIB,
    ),
)

# That of Gaudi 2 was refused as a whole: no rate of its products of 8 bits was known.
FIRST_MACHINES = {
    "maxtext_tpu": First(time_mape=0.159, time_bias=0.156, spearman=0.996),
    "tpu_recipes": First(time_mape=0.644, time_bias=0.644, spearman=0.983),
    "pai_rapidformer_v100": First(
        time_mape=0.424, time_bias=-0.424, spearman=0.836, memory_mape=0.235, memory_bias=0.049
    ),
    "gaudi2_llama": First(),
    "bert_v100": First(time_mape=0.118, time_bias=-0.105, spearman=0.973),
    "lumen_mi325x": First(
        time_mape=0.197, time_bias=-0.197, spearman=0.976, memory_mape=0.158, memory_bias=0.158
    ),
    "swift_qwen3_l40s": First(
        time_mape=0.962, time_bias=-0.962, spearman=0.894, memory_mape=1.248, memory_bias=1.248
    ),
}
