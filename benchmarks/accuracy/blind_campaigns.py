"""Tables of 2026's tuning campaigns and course work, predicted once before an error of theirs was known."""

from __future__ import annotations

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, MIB, allocated, rate_per_gpu, seconds, with_context
from benchmarks.accuracy.tables import Published

CAMPAIGNS = (
    Published(
        name="nemotron_gh200",
        source="Geodesic Research (github.com/GeodesicResearch/geodesic-megatron, docs/investigations/nano30b-midtrain-perf-campaign.md and nano30b-pretrain-perf-campaign.md), September 2026",
        note="Nemotron 3 Nano 30B-A3B by Megatron Bridge on 64 GH200, four a node on Slingshot, sequences of 32,768 and 8,192 tokens: rungs of two ladders, means over 50 and 25 steps on one switch "
        "group. Its second rung lets parameters be gathered under the forward and spares its host, the third sums gradients in 16 bits and cuts the loss into 8 pieces, which are all kept, the fourth "
        "exchanges tokens by HybridEP; of two rows, which recompute fewer layers, only the memory is comparable. Memory is what is reserved in training. Moments are in 16 bits, which the columns cannot "
        "say, and rungs are left out whose experts run again or whose dense layers alone are in 8 bits.",
        seconds=seconds,
        num_bytes=lambda table: table.reserved_gb * 1e9,
        group="seq_len",
    ),
    Published(
        name="together_b200",
        source="a worklog of NVIDIA's DGX Cloud benchmarks on Together AI's B200, April 2026",
        note="Nemotron4 15B by NeMo on 64 to 512 B200 in 16 and in 8 bits, with one to five microbatches a step, and Llama 3.1 405B in NVFP4 by Megatron Bridge on 256 in 8 and in 16 stages. Its made-up "
        "tokens are of a vocabulary of 256 words, as the first loss, 6.1, says too. Memory is what is reserved.",
        seconds=seconds,
        num_bytes=lambda table: table.reserved_gb * 1e9,
        group="precision",
    ),
    Published(
        name="titan_gb200",
        source="Llama 3 8B fixed-batch smoke suite on 4 GB200, torchtitan 041ec017 with torchao f229086c, July 2026",
        note="2,048 tokens, 32 sequences a card in one microbatch, compiled, and 16 in two, of CUDA graphs, in bf16, NVFP4 and MXFP8, operators recomputed selectively. MXFP8's products keep their inputs "
        "in 16 bits, NVFP4's in four, by an override that is not torchao's: its memory is predicted 90 % too high. That torch.compile has the loss too, as by default there, was left out blind. Two rows that differ in the allocator's expandable segments alone are left out.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.reserved_gib * GIB,
        group="precision",
    ),
    Published(
        name="primus_2026",
        source="Primus on MI355X and MI325X (github.com/AMD-AGI/Primus, tools/convergence_test; notes on GPT-OSS-20B), 2026",
        note="GPT-OSS 20B and Llama 3.2 1B by Megatron-LM on one node. GPT-OSS has all experts on each rank, as what gradients of 16 bits save tells (36 GiB), and its "
        "products are taken to be in 16 bits, as its trace has them, though its configuration says 8. Memory is the device's.",
        seconds=seconds,
        num_bytes=lambda table: table.device_memory_bytes,
        memory=with_context,
    ),
    Published(
        name="nemo_a100_2407",
        source="NeMo Llama-2-7B benchmark script (README.md), NeMo 24.07 on 4 A100",
        note="Four layouts of one model and batch: replicas, two tensor-parallel ranks, two stages, two context-parallel ranks. Which A100 is not said; 80 GB is taken.",
        seconds=seconds,
    ),
    Published(
        name="oke_titan_a100",
        source="a post on training by torchtitan on Oracle's Kubernetes (github.com/oci-ai-incubations/monarch-recipe-bp), 2026",
        note="Llama 3 8B on two nodes of 8 A100, by torchtitan's own configuration of then (8,192 tokens, one sequence a card, operators recomputed selectively, eager), as its time for 1000 steps says too: "
        "FSDP, and two replicas of shards by TorchFT. The table's memory is torchtitan's, reserved.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.reserved_gib * GIB,
        group="strategy",
    ),
    Published(
        name="cs336",
        source="published solutions of Stanford's CS336, assignment 2 (systems)",
        note="Its own Transformer of norms, rotary positions, softmax and attention in separate operators, 0.13 to 1.0 G parameters, 128 to 2,048 tokens, on RTX 5090 and A100 in fp32 (TF32 off) and on RTX 4090 "
        "under autocast, eager, compiled and all recomputed; its AdamW is a loop of Python over parameters. Taken as Hugging Face's class of such a model. Memory is the peak allocated.",
        seconds=lambda table: table.step_ms / 1e3,
        num_bytes=lambda table: table.peak_allocated_mib * MIB,
        memory=allocated,
        group="gpu",
    ),
)

FIRST_CAMPAIGNS = {
    "nemotron_gh200": First(
        time_mape=0.361, time_bias=0.361, spearman=0.794, memory_mape=0.045, memory_bias=0.006
    ),
    "together_b200": First(
        time_mape=0.304, time_bias=0.205, spearman=0.885, memory_mape=0.309, memory_bias=0.309
    ),
    "titan_gb200": First(
        time_mape=0.179, time_bias=-0.179, spearman=0.829, memory_mape=0.790, memory_bias=0.790
    ),
    "primus_2026": First(
        time_mape=0.242, time_bias=-0.242, spearman=0.949, memory_mape=0.029, memory_bias=-0.026
    ),
    "nemo_a100_2407": First(time_mape=0.318, time_bias=-0.318, spearman=0.8),
    "oke_titan_a100": First(
        time_mape=0.078, time_bias=0.078, spearman=1.0, memory_mape=0.171, memory_bias=-0.171
    ),
    "cs336": First(time_mape=0.171, time_bias=-0.101, spearman=0.960, memory_mape=0.113, memory_bias=-0.063),
}
