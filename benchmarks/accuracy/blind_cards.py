"""Tables of small trainings on many cards, and of MLPerf's."""

from __future__ import annotations

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, MIB, allocated, seconds, with_context
from benchmarks.accuracy.tables import Published

CARDS = (
    Published(
        name="gpt2_cards",
        source="a training script of GPT-2 124M, with its steps on rented cards written into it (October 2025)",
        note="GPT-2 124M, 524,288 tokens a step, under autocast, compiled with its loss, on 20 cards from an RTX 2000 Ada to a B200 with two micro-batches each, torch 2.8. Its forward returns the logits "
        "beside the loss, which was not known blind; rows of the RTX 2000 Ada were refused then. Memory is the device's. Two cards are 40 % slower than others like them (H100 NVL, RTX 6000 Ada).",
        seconds=lambda table: table.step_ms / 1e3,
        num_bytes=lambda table: table.nvidia_smi_mib * MIB,
        memory=with_context,
        group="gpu",
    ),
    Published(
        name="raschka_gpt2_a100",
        source="Raschka, Build a Large Language Model From Scratch (github.com/rasbt/LLMs-from-scratch, ch05/10_llm-training-speed/README.md of 2025)",
        note="A GPT of 163 M parameters (GPT-2's shape, the head untied) on one and four A100, step by step from fp32 and attention in separate operators to bf16, FlashAttention and torch.compile. "
        "Seconds hold two microbatches of an evaluation every ten steps. Blind it was no GPT-2 by name, whose class has dropouts, and its loss cast the logits, which torch's takes in 16 bits as they are; "
        "its fused AdamW was refused before. Which A100 is not said.",
        seconds=lambda table: table.micro_batch_size * table.n_gpus * table.seq_len / table.tokens_per_s,
        num_bytes=lambda table: table.reserved_gib * GIB,
        group="precision",
    ),
    Published(
        name="torchao_optim",
        source="torchao (github.com/pytorch/ao, torchao/optim/README.md of 2025)",
        note="Vision transformers of 0.6 and 1.1 G parameters fine-tuned on an RTX 4070 Ti SUPER, compiled and eager, with moments in 32, 8 and 4 bits, and with DeepSpeed's on the host. The last were taken for torch's AdamW "
        "over lists blind, where its script has the fused one; 4 bits were refused before. Its own offload, which moves gradients under the backward, no column says.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_allocated_gb * 1e9,
        memory=allocated,
        group="optimizer",
    ),
    Published(
        name="mlperf",
        source="MLPerf Training 4.0, 5.1 and 6.0, logs of results (github.com/mlcommons/training_results_v4.0; github.com/Richardyu114/training_results_v6.0)",
        note="Adapters of Llama 2 70B beside all of attention, and Llama 3.1 8B, 8,192 tokens, in 8 and 4 bits on H100, GH200, GB200, MI300X, MI350X and MI355X; seconds by the samples of a block of training. "
        "That 21 layers of MI300X's run again is in its configuration, which the blind prediction had not. What MI350X and MI355X do in 4 bits was not in the catalogue before.",
        seconds=seconds,
        group="gpu",
    ),
    Published(
        name="mlperf_racks",
        source="MLPerf Training 6.0, logs of NVIDIA's results (github.com/Richardyu114/training_results_v6.0)",
        note="DeepSeek-V3 671B, Llama 3.1 405B and adapters of Llama 2 70B on 72 to 2,048 GB200 and GB300, MXFP8 and NVFP4, by Megatron Bridge with CUDA graphs; seconds by the samples of a block of training. "
        "Blind the trays of four that configurations name were taken for nodes with a network between them; without that column blind steps were off by 10 %. 4,096 tokens of DeepSeek-V3, and NVFP4 of the adapters, are not said in the logs.",
        seconds=seconds,
        group="gpu",
    ),
)

FIRST_CARDS = {
    "gpt2_cards": First(
        time_mape=0.132, time_bias=-0.053, spearman=0.98, memory_mape=0.12, memory_bias=-0.113
    ),
    "raschka_gpt2_a100": First(
        time_mape=0.335, time_bias=-0.335, spearman=0.957, memory_mape=0.34, memory_bias=0.155
    ),
    "torchao_optim": First(
        time_mape=0.096, time_bias=0.064, spearman=0.943, memory_mape=0.076, memory_bias=0.024
    ),
    "mlperf": First(time_mape=0.124, time_bias=-0.069, spearman=0.964),
    "mlperf_racks": First(time_mape=0.792, time_bias=0.792, spearman=0.9),
}
