"""Tables that were predicted once after what FSDP holds had been counted from its code, and none of which changed anything since."""

from __future__ import annotations

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, allocated, rate, rate_per_gpu
from benchmarks.accuracy.tables import Published

CONFIRMED = (
    Published(
        name="float8_nocompile",
        source="torchao (github.com/pytorch/ao, torchao/prototype/float8nocompile/README.md)",
        note="Llama 3 8B by torchtitan's FSDP2 on 8 H100, 4,096 tokens, in bf16 and in 8 bits, eager, by kernels of its own, and compiled; nothing, every other layer "
        "(16 of 32 here) and all layers recomputed. Neither the model nor the batch is stated: torchtitan's configuration of then has one sequence, and the peaks, which it "
        "reports as reserved, say so too. Nor is the H100: torchtitan's own tables are of cards of 500 W with memory of 2.4 TB/s, and H100 of 700 W are predicted.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.peak_gb * 1e9,
        group="precision",
    ),
    Published(
        name="halo_lora_b300",
        source="halo (github.com/whitecircle/halo, agent-docs/optimization/peft.md)",
        note="Qwen3 8B of 16,384 and 32,768 tokens on one B300, whole, with adapters and with adapters on 4 bits, and GPT-OSS 20B on 8, by Hugging Face's classes with Liger's kernels. "
        "Adapters beside experts, which the columns cannot say, are left out. Memory is the peak allocated.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.peak_allocated_gib * GIB,
        memory=allocated,
    ),
    Published(
        name="vectorlm_a100",
        source="VectorLM (github.com/VectorInstitute/vectorlm, docs/reference_throughput.md)",
        note="Llama 3 8B of Hugging Face's class under FSDP on one, two and four A100, whole and with adapters of rank 8 beside queries and values, 16,384 tokens a microbatch in sequences of 2,048 to "
        "8,192, the fastest of three batches. Accumulation, dropout and recomputation are those of its configurations (profiling/configs); that it is all in bf16 follows from 8B whole on one card.",
        seconds=rate,
    ),
)

FIRST_CONFIRMED = {
    "float8_nocompile": First(
        time_mape=0.356, time_bias=-0.356, spearman=0.867, memory_mape=0.04, memory_bias=-0.04
    ),
    "halo_lora_b300": First(
        time_mape=0.232, time_bias=-0.084, spearman=0.6, memory_mape=0.033, memory_bias=0.006
    ),
    "vectorlm_a100": First(time_mape=0.05, time_bias=0.009, spearman=0.878),
}
