"""Published benchmarks of cards and of trainers beside each other, predicted once before anybody looked at an error of them."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import GIB, MIB, allocated, rate_per_gpu
from benchmarks.accuracy.tables import Published


def _from_batches(table: pd.DataFrame) -> pd.Series:
    return table.global_batch_seqs / table.sequences_per_s


def _from_either_rate(table: pd.DataFrame) -> pd.Series:
    """Tensor-parallel rows have the rate of all accelerators together, others that of each."""
    of_all = table.tokens_per_s_per_gpu * table.n_gpus
    return table.global_batch_seqs * table.seq_len / of_all.fillna(table.cluster_tokens_per_s)


COMPARISONS = (
    Published(
        name="paddlenlp_a100",
        source="PaddleNLP (github.com/PaddlePaddle/PaddleNLP, llm/docs/pretrain.md)",
        note="Llama 1 and 2, Baichuan 2 and Qwen, 7B and 13B, on 8 A100 by PaddlePaddle, two tensor ranks and states sharded in stage 2 among four, or among "
        "eight. Micro-batches, and what is recomputed, are those of its configurations; steps have 64 sequences, as an earlier version of the page says. Memory is the peak allocated.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.peak_allocated_mib * MIB,
        memory=allocated,
    ),
    Published(
        name="lambda_bert",
        source="Lambda (github.com/lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-fp16.csv and -fp32.csv)",
        note="Fine-tuning of BERT base and large on questions of 384 tokens by NVIDIA's DeepLearningExamples, fp16 and fp32, on one, two and four cards of 12 "
        "kinds, V100 to H100; batches are those that fill the cards, of its configurations. Eight cards are left out: steps of the base model are then fewer than "
        "its rate is counted with. Machines with the same card twice are taken once. Links are not given. Its head marks answers, where here each token has a vocabulary's.",
        seconds=_from_batches,
        group="gpu",
    ),
    Published(
        name="timm_rtx3090",
        source="timm (github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv)",
        note="Vision transformers, 6M to 1B, of 50 to 785 tokens on one RTX 3090, torch.autocast in fp16 and SGD with momentum, as its script has them. Encoders "
        "with a head over 1000 classes of each token, where theirs has one of each image.",
        seconds=lambda table: table.train_step_time_ms / 1e3,
    ),
    Published(
        name="halo_b300",
        source="halo (github.com/whitecircle/halo, agent-docs/optimization, September 2026)",
        note="GPT-OSS 20B, Qwen3 30B-A3B, Qwen3.5 35B-A3B on 8 B300 and Qwen3 4B and 8B on one, 2,048 to 262,144 tokens, experts on 1, 2 and 8 ranks, sequences "
        "whole or shared by heads among 8, under FSDP2. Attention is FlashAttention 4, which was predicted as the second generation blind, and torch's of Qwen3.5; parameters, gradients and moments are in 16 bits. Half of GPT-OSS's layers see 128 tokens, where all were taken to see all. Its kernels are Liger's, whose loss is over logits in fp32, and none with tensor or sequence parallelism (its page on them, which blind rows did not heed). Experts on two ranks are not sharded among their four copies, nor is "
        "anything else taken to be then. Rows of Gemma 4 and Mistral Small 4, of which the one is not known here and the other has another layout than the columns can say, are left out. Memory is the peak allocated.",
        seconds=_from_either_rate,
        num_bytes=lambda table: table.peak_allocated_gib * GIB,
        memory=allocated,
    ),
    Published(
        name="trl_b300",
        source="halo's comparison with TRL (github.com/whitecircle/halo, agent-docs/optimization/halo-vs-stock-trl.md)",
        note="GPT-OSS 20B and Qwen3 30B-A3B, all parameters, 4,096 to 262,144 tokens, on 8 B300 by TRL's SFTTrainer under FSDP2, with Liger's loss and FlashAttention 4; kernels and windows as in halo_b300. Memory is the peak allocated.",
        seconds=_from_either_rate,
        num_bytes=lambda table: table.peak_allocated_gib * GIB,
        memory=allocated,
    ),
)

FIRST_COMPARISONS = {
    "paddlenlp_a100": First(
        time_mape=0.154, time_bias=-0.154, spearman=0.944, memory_mape=0.186, memory_bias=-0.186
    ),
    "lambda_bert": First(time_mape=0.682, time_bias=0.433, spearman=0.627),
    "timm_rtx3090": First(time_mape=0.069, time_bias=0.046, spearman=0.994),
    "halo_b300": First(
        time_mape=0.352, time_bias=-0.092, spearman=0.909, memory_mape=0.244, memory_bias=-0.21
    ),
    "trl_b300": First(time_mape=0.48, time_bias=-0.31, spearman=0.961, memory_mape=0.06, memory_bias=0.044),
}
