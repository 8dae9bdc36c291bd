"""Published fine-tuning, mostly of low-rank adapters, that was predicted once before anybody looked at an error of it."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, allocated, rate_per_gpu, seconds, with_context
from benchmarks.accuracy.tables import Published


def _of_all_gpus(table: pd.DataFrame) -> pd.Series:
    return table.memory_gb_all_gpus * 1e9 / table.n_gpus


def _of_1024_samples(table: pd.DataFrame) -> pd.Series:
    """A step of an epoch of so many samples."""
    return table.seconds_for_1024_samples * table.micro_batch_size * table.n_gpus / 1024


def _of_whole_machine(table: pd.DataFrame) -> pd.Series:
    return table.micro_batch_size * table.grad_accum * table.n_gpus * table.seq_len / table.tokens_per_s


FINETUNING = (
    Published(
        name="qwen_finetuning_a100",
        source="Qwen (github.com/QwenLM/Qwen, README.md, profiling of memory and speed)",
        note="Qwen 1.8B to 72B on one A100, on 2 to 4 under DeepSpeed: LoRA of rank 64 beside all matrices, with and without the embedding and "
        "the head, beside GPTQ's 4 bits, and all parameters. 256 to 8192 tokens, all recomputed, as its scripts have it. The network of the two "
        "servers is not given. Under DeepSpeed the loss is of 16-bit logits, as its class has it (seen after the blind prediction). Which memory is not said: the whole device's is taken.",
        seconds=seconds,
        num_bytes=_of_all_gpus,
        memory=with_context,
        group="method",
    ),
    Published(
        name="litgpt_lora_a100",
        source="LitGPT (github.com/Lightning-AI/litgpt, tutorials/resource-tables.md of October 2023)",
        note="LoRA of Llama 2, phi-1.5 and StableLM Alpha on 1 to 4 A100 of 40 GB, 16 bits and NF4. Sequences are as long as the longest of the "
        "data, which is when memory peaks; times are of shorter ones and left out. Memory is the peak allocated. On several cards that is of "
        "loading, to judge by its size (the whole model and a shard of it): it was predicted blind, and is no longer compared.",
        seconds=lambda table: pd.Series(float("nan"), index=table.index),
        num_bytes=lambda table: pd.to_numeric(table.memory_gb) * 1e9,
        memory=allocated,
    ),
    Published(
        name="ms_swift_a100",
        source="ms-swift (github.com/modelscope/ms-swift, docs/source_en/LLM/Benchmark.md)",
        note="Qwen and Yi, 1.8B to 72B, on one A100: LoRA beside queries, keys and values (and by rank, matrices, batch, attention and base), and "
        "all parameters. Sequences are cut at the length given; times, of samples of unknown length, are left out. Memory is the peak reserved.",
        seconds=lambda table: pd.Series(float("nan"), index=table.index),
        num_bytes=lambda table: table.peak_reserved_gib * GIB,
        group="sft_type",
    ),
    Published(
        name="llama_factory_a100",
        source="LLaMA-Factory (github.com/hiyouga/LLaMA-Factory, wiki, performance comparison of April 2024)",
        note="LoRA of Llama 2 7B on one A100 of 40 GB, 16 bits and 4, to 100,000 tokens, by Hugging Face's classes and by Unsloth. That the first "
        "table is of the same card, and what is recomputed (all), is taken. Memory is in whole GB, and not said which: the device's is taken.",
        seconds=lambda table: table.micro_batch_size * table.grad_accum * table.seq_len / table.tgs,
        num_bytes=lambda table: pd.to_numeric(table.vram_gb) * 1e9,
        memory=with_context,
        group="framework",
    ),
    Published(
        name="torchtune_lora",
        source="torchtune (github.com/pytorch/torchtune, README.md of September 2024)",
        note="Llama 3.1 8B to 405B on one RTX 4090 and on 8 A100, LoRA and QLoRA. Matrices with adapters, and that all is recomputed, are its "
        "recipes'; the row of an A6000, without recomputation to judge by its memory, is left out.",
        seconds=_of_whole_machine,
        num_bytes=lambda table: table.memory_gib * GIB,
        memory=allocated,
    ),
    Published(
        name="fsdp_qlora",
        source="Answer.AI (github.com/AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md)",
        note="Llama 2 7B and 70B, Yi 34B and Mistral 7B on two RTX 3090 of 280 W or 4090, both without NVLink, and on A100 and H100: LoRA and "
        "QLoRA sharded by FSDP or whole, with and without parameters on the host. Memory is the peak reserved.",
        seconds=_of_1024_samples,
        num_bytes=lambda table: table.peak_reserved_gib * GIB,
        group="gpu",
    ),
    Published(
        name="nemo_lora_h100",
        source="NVIDIA NeMo 24.07, performance summary (github.com/NVIDIA/NeMo), and NeMo AutoModel (github.com/NVIDIA-NeMo/Automodel, "
        "docs/performance-summary.md of October 2025)",
        note="LoRA of Llama 2 in FP8 and of Llama 3 70B in bf16 on 8 H100. Ranks and matrices are NeMo's usual ones, and the chunks of a stage of "
        "Llama 2 70B are not given; Llama 2's sequences are packed of shorter ones, whose attention is taken for whole. What Llama 3 70B recomputes and "
        "has adapters beside is as in AutoModel's configuration of that layout (custom_llama3_3_70b_instruct_peft_benchmark.yaml, in a copy of the repository, "
        "github.com/khazic/Automodel_lao, for its own has other layouts before and after); its blind prediction "
        "had neither.",
        seconds=rate_per_gpu,
    ),
    Published(
        name="automodel_lora_h100",
        source="NVIDIA NeMo AutoModel (github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.mdx of June 2026)",
        note="LoRA of Llama 3 and Qwen2.5, 7B to 70B, on 1 to 16 H100, and Llama 3 70B whole on 64; what is recomputed and has adapters is as in "
        "its benchmark configurations. The two rows of one card were predicted blind with Hugging Face's classes, which a configuration names; the "
        "page names Transformer Engine's kernels. Models with state-space layers are left out. It was entered after the others were looked at.",
        seconds=seconds,
        group="peft",
    ),
    Published(
        name="ms_swift_megatron_a800",
        source="ms-swift (github.com/modelscope/ms-swift, Megatron-SWIFT's benchmark and examples/train/megatron)",
        note="Qwen2.5 14B on 8 and Qwen3 30B-A3B on 16 A800, all parameters, by Megatron Core and by Hugging Face's classes under DeepSpeed. Which "
        "memory is not said: the whole device's is taken.",
        seconds=seconds,
        num_bytes=lambda table: table.memory_gb * 1e9,
        memory=with_context,
        group="framework",
    ),
    Published(
        name="unsloth_context",
        source="Unsloth (unsloth.ai/docs, benchmarks)",
        note="The longest sequence that fits into 8 to 80 GB in a QLoRA of Llama 3.1 8B and 3.3 70B, by Unsloth and by Hugging Face's classes: a "
        "peak of that many GB.",
        seconds=lambda table: pd.Series(float("nan"), index=table.index),
        num_bytes=lambda table: table.gpu_vram_gb * 1e9,
        memory=with_context,
        group="framework",
    ),
)

# Of the code before what they showed was mended.
FIRST_FINETUNING = {
    "qwen_finetuning_a100": First(time_mape=0.232, time_bias=-0.189, spearman=0.949, memory_mape=0.092, memory_bias=0.051),
    "litgpt_lora_a100": First(memory_mape=0.295, memory_bias=-0.295),
    "ms_swift_a100": First(memory_mape=0.251, memory_bias=-0.245),
    "llama_factory_a100": First(time_mape=0.289, time_bias=0.244, spearman=0.97, memory_mape=0.385, memory_bias=0.375),
    "torchtune_lora": First(time_mape=0.118, time_bias=0.052, spearman=1.0, memory_mape=0.043, memory_bias=0.022),
    "fsdp_qlora": First(time_mape=0.185, time_bias=-0.082, spearman=0.964, memory_mape=0.213, memory_bias=-0.213),
    "nemo_lora_h100": First(time_mape=0.286, time_bias=-0.02, spearman=1.0),
    "automodel_lora_h100": First(time_mape=0.205, time_bias=0.205, spearman=1.0),
    "ms_swift_megatron_a800": First(time_mape=0.341, time_bias=-0.303, spearman=-0.1, memory_mape=0.142, memory_bias=-0.126),
    "unsloth_context": First(memory_mape=2.484, memory_bias=2.468),
}  # fmt: skip
