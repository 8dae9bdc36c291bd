"""Published comparisons of layouts and of ways to shard, predicted once before anybody looked at an error of them."""

from __future__ import annotations

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import MIB, rate, rate_per_gpu, seconds, with_context
from benchmarks.accuracy.tables import Published

LAYOUTS = (
    Published(
        name="qwen3_strategies_h100",
        source="Qwen3 distributed-strategy experiments (github.com/BastiaanGroot/ML-Infrastructure-Engineer, training/README.md)",
        note="Qwen3 1.7B, 8B, 32B and 30B-A3B by Megatron Bridge (nemo:25.09) on two nodes of 8 H100, 4,096 and 16,384 tokens: data, tensor, pipeline, context and expert "
        "parallelism, FP8, attention in memory, activations on the host, recomputation. No sequence parallelism, and full recomputation of the two larger models, as its "
        "recipes have it, which sum and reduce gradients in fp32 besides (that column was left out blind). The gate of the MLP is in separate kernels there, which no column says. Memory is "
        "the peak of the first rank's tensors.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_allocated_gb * 1e9,
        memory=lambda estimate: estimate.first.allocated_bytes,
    ),
    Published(
        name="yafsdp_a100",
        source="YaFSDP (github.com/yandex/YaFSDP, README.md)",
        note="Llama 2 7B to 70B and Llama 3 8B and 70B, one sequence of 2,048 to 8,192 tokens on each of 64 to 256 A100, by torch's FSDP and by Yandex's own, some layers "
        "recomputed. The network is not given, nor whose code the model is.",
        seconds=lambda table: table.iteration_s,
        group="framework",
    ),
    Published(
        name="olmo_core_h100",
        source="OLMo-core (github.com/allenai/OLMo-core, README.md of March 2025)",
        note="OLMo 2 1B to 32B and Llama 3 8B on H100 under hybrid sharding, bf16 and float8, with torch.compile. Micro-batches, batches and what is recomputed are those of its "
        "scripts (of 2025, which vary by commit); how many accelerators is not said: 64, and 512 of 32B, are taken. Rates are rounded to two digits.",
        seconds=rate_per_gpu,
        group="precision",
    ),
    Published(
        name="tilearn_llama3",
        source="Tencent's tilearn (github.com/TencentCloud/tione-tilearn-angel, benchmark/README.md), its baseline",
        note="Llama 3 8B fine-tuned whole by LLaMA-Factory under DeepSpeed's ZeRO stage 3 on 8 A800, and on 8 A100 of 40 GB, which it all but fills, with recomputation, packs of "
        "4,096 tokens. Memory is taken to be the device's, its driver among it.",
        seconds=seconds,
        num_bytes=lambda table: table.nvidia_smi_mib * MIB,
        memory=with_context,
        group="gpu",
    ),
    Published(
        name="easycontext_a100",
        source="EasyContext (github.com/jzhang38/EasyContext, README.md)",
        note="Llama 2 7B, 65,536 to 700,000 tokens on 8 A100 by Hugging Face's class under DeepSpeed's ZeRO stage 3 with parameters and optimizer on the host, whole sequences on each "
        "rank or shared in a ring, the first five steps. Two microbatches a step are taken of its scripts' two to four.",
        seconds=rate,
        group="cp",
    ),
)

FIRST_LAYOUTS = {
    "qwen3_strategies_h100": First(
        time_mape=0.195, time_bias=-0.188, spearman=0.918, memory_mape=0.208, memory_bias=-0.208
    ),
    "yafsdp_a100": First(time_mape=0.146, time_bias=-0.142, spearman=0.992),
    "olmo_core_h100": First(time_mape=0.112, time_bias=0.005, spearman=0.988),
    "tilearn_llama3": First(
        time_mape=0.194, time_bias=-0.194, spearman=1.0, memory_mape=0.244, memory_bias=-0.244
    ),
    "easycontext_a100": First(time_mape=0.202, time_bias=0.085, spearman=1.0),
}
