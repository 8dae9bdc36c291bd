"""Steps told by logs, reports and tests in public repositories, predicted once before anybody looked at an error of them."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import MIB, allocated, seconds
from benchmarks.accuracy.tables import Published
from memadvisor.cost.layouts.estimate import StepEstimate

_H800_FLOPS_PER_S = 989e12  # of the sheet, as an H200's, which the published MFU is of
_GPT2_XL_PARAMETERS = 1_557_680_000  # of the script, whose vocabulary is padded


def _last_stage(estimate: StepEstimate) -> float:
    """Megatron-LM logs the memory of its last rank."""
    return estimate.last.allocated_bytes


def _executed_llama2_7b(table: pd.DataFrame) -> pd.Series:
    """From FLOP/s that count the layers' second forward, all of attention, and of adapters a backward as long as the forward."""
    tokens = table.global_batch_seqs * table.seq_len
    layer = 8 * 4096**2 + 4 * table.seq_len * 4096 + 6 * 4096 * 11008
    passes = table.peft.map({"lora": 2, "full": 3})
    per_token = 32 * layer * (passes + 1) + 2 * 4096 * 32000 * passes
    return per_token * tokens / (table.hfu_tflops_per_gpu * 1e12 * table.n_gpus)


def from_megatron_flops(table: pd.DataFrame, flops_per_s: pd.Series) -> pd.Series:
    """From FLOP/s as Megatron Core counts them: the products of a token with the experts that it passes, the head's, and half of
    attention.
    """
    inner = table.n_heads * table.head_dim
    experts = table.experts_per_token.fillna(1) if "experts_per_token" in table else 1
    block = 2 * inner + 2 * table.n_kv_heads * table.head_dim + 3 * table.ffn * experts
    per_token = 6.0 * (
        table.n_layers * (table.hidden * block + inner * table.seq_len) + table.hidden * table.vocab
    )
    return per_token * table.global_batch_seqs * table.seq_len / (flops_per_s * table.n_gpus)


def _gpt2_xl(table: pd.DataFrame) -> pd.Series:
    """Of a step of eight microbatches: the script's FLOP/s are of one microbatch, six a parameter and 12 L h s of attention."""
    per_token = 6.0 * _GPT2_XL_PARAMETERS + 12 * 48 * 1600 * table.seq_len
    return (
        per_token * table.micro_batch_size * table.grad_accum * table.seq_len / (table.tflops_per_gpu * 1e12)
    )


LOGS = (
    Published(
        name="megatron_core_tests",
        source="Megatron-LM, recorded values of its functional and release tests (github.com/NVIDIA/Megatron-LM, tests/functional_tests/test_cases)",
        note="A GPT of 7B with four tensor-parallel ranks and with four stages of eight chunks on 8 A100, H100, GB200 and GB300, and Mixtral 8x7B and 8x22B on "
        "64 and 128 H100: medians of steps, and the peak of tensors of the last rank to the byte. The 7B is run to the same bits each time, with Megatron's dropouts, which were "
        "left out blind; how many accelerators Mixtral had follows from its bytes at rest. Models with multi-token prediction, and those whose number of accelerators nothing tells, are left out.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_allocated_bytes,
        memory=_last_stage,
        group="gpu",
    ),
    Published(
        name="twist_hopper",
        source="TWIST, its comparison with Megatron-LM (github.com/DHelix-AI/dhelix, March 2026), Megatron-LM's rows",
        note="Models of Qwen3 32B's and 14B's shape on 32 H800 and 8 H200 by Megatron Core 0.14 with FlashAttention 3, three layouts of 4,096 and 8,192 tokens. "
        "The vocabulary is not given: Qwen3's is taken. Steps follow from the published MFU, in whole per cent of the H200.",
        seconds=lambda table: from_megatron_flops(table, table.mfu_pct / 100 * _H800_FLOPS_PER_S),
        group="gpu",
    ),
    Published(
        name="lumi_mi250x",
        source="Scaling of language models on LUMI (github.com/spyysalo/lumi-llm-scaling, meg-ds, of 2023)",
        note="GPTs of 33B, 65B and 175B by Megatron-DeepSpeed on 32 and 64 MI250X (64 and 128 dies), all recomputed, scores in memory: medians of four to "
        "thirteen steps.",
        seconds=lambda table: table.global_batch_seqs / table.sequences_per_s,
    ),
    Published(
        name="megatron_gh200",
        source="A search of layouts on Alps (github.com/Zeltrxn2333/lsaie-ss26-gipfelsturm, May 2026), launched as its launch-mp.sh has it",
        note="Models of 8B to 140B, of Qwen's, Llama's and Mixtral's shapes, by Megatron Core 0.16 on 4 to 32 GH200, gradients of 16 bits. Steps follow from Megatron's FLOP/s. "
        "Moments in 16 bits, which the columns cannot say, matter little to them.",
        seconds=lambda table: from_megatron_flops(table, table.tflops_per_gpu * 1e12),
    ),
    Published(
        name="megatron_memory_gh200",
        source="A report of layouts on Alps (github.com/Giulio2002/lsaie-ss26-gipfelsturm, final_benchmark_report.md of 2026)",
        note="Micro-batches, tensor-parallel ranks, nodes and sequences of one model by Megatron Core on 4 to 16 GH200. The report names its 8B, which was predicted blind; "
        "its FLOP/s over its tokens a second are those of its launcher's 1.5B. Times are left out: of the same layout they differ by a third, and two nodes take as long as one.",
        seconds=lambda table: pd.Series(float("nan"), index=table.index),
        num_bytes=lambda table: table.peak_allocated_gb * 1e9,
        memory=allocated,
        group="tp",
    ),
    Published(
        name="atorch_llama2_a100",
        source="ATorch (github.com/intelligent-machine-learning/dlrover, atorch/examples/llama2/README.md)",
        note="Llama 2 7B of Hugging Face's class on 8 to 64 A100, all recomputed, by FSDP, whole and with adapters, and by DeepSpeed's pipeline with tensor-parallel layers of "
        "ATorch's. Steps follow from its FLOP/s. That the classes run operator by operator was left out blind. Its FSDP shards fp32 parameters under torch.autocast, which is not modelled "
        "(FSDP is taken to cast them): some 4 GB of a stream in fp32 are what is known of the 17 GB that its memory is above the prediction on any number of cards.",
        seconds=_executed_llama2_7b,
        num_bytes=lambda table: table.peak_allocated_mib * MIB,
        memory=allocated,
        group="framework",
    ),
    Published(
        name="te_gpt2xl_hopper",
        source="An issue of Transformer Engine for ROCm (github.com/ROCm/TransformerEngine/issues/72, October 2024), its NVIDIA rows",
        note="GPT-2 XL of Transformer Engine's layers in FP8 under torch.autocast on one H100 and one H200, 8 to 38 sequences a microbatch. FLOP/s are of the script's own "
        "count. Rows of MI300X, which a missing kernel of attention held up, are left out.",
        seconds=_gpt2_xl,
        group="gpu",
    ),
)

FIRST_LOGS = {
    "megatron_core_tests": First(
        time_mape=0.259, time_bias=-0.221, spearman=0.927, memory_mape=0.044, memory_bias=-0.044
    ),
    "twist_hopper": First(time_mape=0.061, time_bias=0.056, spearman=0.893),
    "lumi_mi250x": First(time_mape=0.329, time_bias=-0.329, spearman=1.0),
    "megatron_gh200": First(time_mape=0.1, time_bias=-0.1, spearman=0.817),
    "megatron_memory_gh200": First(memory_mape=1.293, memory_bias=1.293),
    "atorch_llama2_a100": First(
        time_mape=0.153, time_bias=-0.153, spearman=1.0, memory_mape=0.374, memory_bias=-0.373
    ),
    "te_gpt2xl_hopper": First(time_mape=0.091, time_bias=-0.065, spearman=1.0),
}
