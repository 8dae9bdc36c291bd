"""Published tables that no fit ran on (benchmarks/unseen/*.csv), and docs/accuracy-unseen.md from them."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.accuracy.blind import BLIND, FIRST
from benchmarks.accuracy.blind_campaigns import CAMPAIGNS, FIRST_CAMPAIGNS
from benchmarks.accuracy.blind_cards import CARDS, FIRST_CARDS
from benchmarks.accuracy.blind_classes import CLASSES, FIRST_CLASSES
from benchmarks.accuracy.blind_comparisons import COMPARISONS, FIRST_COMPARISONS
from benchmarks.accuracy.blind_confirmed import CONFIRMED, FIRST_CONFIRMED
from benchmarks.accuracy.blind_finetuning import FINETUNING, FIRST_FINETUNING
from benchmarks.accuracy.blind_kinds import FIRST_KINDS, KINDS
from benchmarks.accuracy.blind_layouts import FIRST_LAYOUTS, LAYOUTS
from benchmarks.accuracy.blind_logs import FIRST_LOGS, LOGS
from benchmarks.accuracy.blind_machines import FIRST_MACHINES, MACHINES
from benchmarks.accuracy.blind_measured import FIRST_MEASURED, MEASURED
from benchmarks.accuracy.blind_offloads import FIRST_OFFLOADS, OFFLOADS
from benchmarks.accuracy.blind_recipes import FIRST_RECIPES, RECIPES
from benchmarks.accuracy.blind_suites import FIRST_SUITES, SUITES
from benchmarks.accuracy.blind_sweeps import FIRST_SWEEPS, SWEEPS
from benchmarks.accuracy.blind_trainers import FIRST_TRAINERS, TRAINERS
from benchmarks.accuracy.blind_two_trainers import FIRST_TWO_TRAINERS, TWO_TRAINERS
from benchmarks.accuracy.measures import (
    GIB,
    MIB,
    allocated,
    from_flops,
    rate,
    rate_per_gpu,
    seconds,
    with_context,
)
from benchmarks.accuracy.scores import Errors, errors
from benchmarks.accuracy.tables import Published

_WORST = 15
# A row that is further off is named on the page.
_FAR_TIME, _FAR_MEMORY = 0.25, 0.15
_TOLD = (
    "release", "model", "hidden", "gpu", "n_gpus", "precision", "dp", "tp", "pp", "cp", "vp", "ep", "seq_len",
    "micro_batch_size", "recompute", "compile",
)  # fmt: skip


UNSEEN = (
    Published(
        name="llm_foundry_h100",
        source="MosaicML (github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md), its H100 tables",
        note="FSDP of MPT 350M to 70B on 8 to 64 H100, sequence 512 to 65k, bf16 and FP8, of 2023. Its A100 tables, of other "
        "models' shapes and other years, are among those that were fitted to.",
        seconds=rate,
    ),
    Published(
        name="nemo_h100_fp8",
        source="NVIDIA NeMo 24.07, performance summary (github.com/NVIDIA/NeMo, docs/source/performance)",
        note="GPT-3, Llama 2 and 3, Nemotron on 8 to 512 H100 in FP8. Shapes of GPT-3 5B and 20B are NeMo's own recipes'; the "
        "virtual stages of the last three rows (fine-tuning) are not given.",
        seconds=rate_per_gpu,
    ),
    Published(
        name="megatron_bridge",
        source="NVIDIA Megatron Bridge, performance summaries of 25.09, 25.11 and 26.02 (github.com/NVIDIA-NeMo/Megatron-Bridge, "
        "docs/performance-summary-archive.md)",
        note="Llama 3, DeepSeek-V3, GPT-OSS, Qwen3 on H100, B200, B300, GB200, GB300; bf16, FP8, MXFP8, NVFP4. What is in CUDA "
        "graphs, recomputed or overlapped, and in what gradients are reduced, is of its recipes (scripts/performance/configs) "
        "where one has the row's layout; layers of sliding windows and of multi-token prediction are taken as others.",
        seconds=rate_per_gpu,
        group="gpu",
    ),
    Published(
        name="nemotron_nano",
        source="NVIDIA Megatron Bridge, performance summary of 26.04.01 (github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md), "
        "and NeMo AutoModel (github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.md of April 2026)",
        note="Nemotron 3 Nano, of Mamba 2, experts and attention in layers of their own, on 8 accelerators: the one model with recurrences "
        "that is compared. Predicted blind: nothing that it tells was fitted or changed since. Not stated is what is in CUDA graphs "
        "or recomputed; rows of H100 in FP8, whose recipe runs experts again, are left out.",
        seconds=rate_per_gpu,
        group="gpu",
    ),
    Published(
        name="nemotron4_h100",
        source="Parmar et al. 2024, Nemotron-4 15B (arXiv:2402.16819), table 2, and NVIDIA 2024, Nemotron-4 340B (arXiv:2406.11704), "
        "table 2",
        note="768 to 6,144 H100 in bf16. The micro-batch (of 340B 1 is taken, of 15B the fastest), the chunks of 340B's stages (of a "
        "layer each) and the trainer (NeMo) are not given.",
        seconds=lambda table: table.iteration_s,
    ),
    Published(
        name="automodel_h100",
        source="NVIDIA NeMo AutoModel (github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.md of October 2025)",
        note="DeepSeek-V3, Kimi K2, Qwen3 30B-A3B on 8 to 1024 H100; FSDP with expert and pipeline parallelism. Rows without a "
        "number of expert-parallel ranks are left out. That all is recomputed and that tokens have experts in turn is from the recipes that the page "
        "names (examples/benchmark/configs, at revisions 037e04a6, 080dca53 and 092af93e; without recomputation none is predicted to fit). They leave parameters gathered behind the forward besides, and flush the "
        "pipeline of 1024 cards four times a step, which no column says.",
        seconds=seconds,
    ),
    Published(
        name="torchtitan",
        source="torchtitan (github.com/pytorch/torchtitan, benchmarks/ and docs/performance.md, 2024 and 2025)",
        note="Llama 2 and 3, 8B to 405B, on 8 to 512 accelerators. Its H100 are cards of 500 W with 96 GB at 2.4 TB/s, "
        "as it says. Memory is the peak reserved, of all ranks.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.reserved_gib * GIB,
    ),
    Published(
        name="kempner_h200",
        source="KempnerForge (github.com/KempnerInstitute/KempnerForge, benchmarks/, April to July 2026)",
        note="Llamas of 7B to 175B on 1 to 360 H200, four to a node; FSDP2 and tensor parallelism. Memory is the peak allocated. "
        "Which states are in 16 bits is not given: it follows from one accelerator's 80.7 GiB for 8.0e9 parameters. Its cross entropy "
        "takes 16-bit logits without a cast (kempnerforge/training/loss.py).",
        seconds=rate,
        num_bytes=lambda table: table.memory_gib * GIB,
        memory=allocated,
    ),
    Published(
        name="fms_fsdp",
        source="IBM (github.com/foundation-model-stack/fms-fsdp, README of two dates)",
        note="Llama 2 7B to 70B, FSDP and HSDP on 128 A100 (400 Gb/s a node) and 96 H100 (800 Gb/s a node). Recomputation of every "
        "other layer is left out.",
        seconds=rate_per_gpu,
    ),
    Published(
        name="skywork_a800",
        source="Wei et al. 2023, Skywork (arXiv:2310.19341), table 10",
        note="Two models of 13B on 512 A800 by Megatron-LM, six layouts each, of which one ran out of memory. Which memory is not said: "
        "the whole device's is taken.",
        seconds=rate_per_gpu,
        num_bytes=lambda table: table.memory_gb * 1e9,
        memory=with_context,
    ),
    Published(
        name="megascale_a100",
        source="Jiang et al. 2024, MegaScale (arXiv:2402.15627), table 2, its Megatron-LM rows",
        note="GPT-3 175B on 256 to 12,288 A100. The micro-batch (1 is taken), what is recomputed (attention's scores are, with "
        "sequence parallelism: Korthikanti et al. 2022) and whether attention is fused (it is not taken to be) are not given.",
        seconds=lambda table: table.iteration_s,
    ),
    Published(
        name="bloom_a100",
        source="BigScience (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, February 2022)",
        note="GPTs of 18B to 206B on 8 to 384 A100, Megatron-DeepSpeed with ZeRO stage 1. Second iterations of each run, days with "
        "another PCIe and NUMA setting among them, and from some day on with CUDA_LAUNCH_BLOCKING=1. Memory is what nvidia-smi "
        "said. Heads of the 14400 wide models are those of one of their runs.",
        seconds=seconds,
        num_bytes=lambda table: table.nvidia_smi_gb * 1e9,
        memory=with_context,
        group="tp",
    ),
    Published(
        name="nanotron_1b_h100",
        source="nanotron (huggingface.co/nanotron/old_bench, log_metrics.csv of runs of July 2024)",
        note="One model on 8 to 64 H100; the median iteration, and no time where iterations differ by more than a tenth (network or "
        "allocator). Memory is the peak reserved. The shape follows from the published FLOPs and states.",
        seconds=lambda table: table.iteration_ms / 1e3,
        num_bytes=lambda table: table.peak_reserved_mib * MIB,
    ),
    Published(
        name="llama3_405b_h100",
        source="Grattafiori et al. 2024 (arXiv:2407.21783), table 4",
        note="8,192 and 16,384 H100, sequence 8k and 128k; 16 M tokens a step. The chunks of a stage are not given: 8 are taken. "
        "Times are derived from the published FLOP/s.",
        seconds=from_flops,
    ),
    Published(
        name="hf_bert_v100",
        source="Hugging Face transformers, perf_train_gpu_one.mdx of 2022 (github.com/huggingface/transformers)",
        note="BERT large on one V100 under its Trainer, whose optimizer of the time was written out operator by operator. Memory is "
        "what nvidia-smi said. The model has a classifier's head there, a language model's here.",
        seconds=lambda table: table.micro_batch_size * table.grad_accum / table.samples_per_s,
        num_bytes=lambda table: table.nvidia_smi_mib * MIB,
        memory=with_context,
        group="precision",
    ),
    Published(
        name="tinyllama_a100",
        source="TinyLlama (github.com/jzhang38/TinyLlama, README.md)",
        note="1.1B on 16 A100 of 40 GB.",
        seconds=rate_per_gpu,
    ),
    *BLIND,
    *FINETUNING,
    *RECIPES,
    *MACHINES,
    *TRAINERS,
    *COMPARISONS,
    *SUITES,
    *LAYOUTS,
    *KINDS,
    *TWO_TRAINERS,
    *CLASSES,
    *MEASURED,
    *CONFIRMED,
    *CAMPAIGNS,
    *CARDS,
    *LOGS,
    *SWEEPS,
    *OFFLOADS,
)


def unseen_page(frames: Mapping[str, pd.DataFrame]) -> str:
    """Markdown."""
    parts = [
        "# How far predictions are from tables that no fit ran on",
        "",
        "`python benchmarks/unseen.py --write docs/accuracy-unseen.md` writes this page from benchmarks/unseen/*.csv: published steps "
        "of other models, machines and trainers than those of [accuracy.md](accuracy.md). "
        "No fit ran on them, but seven coefficients were set by hand with them in view (`attention_backward_share`, `across_share`, `module_hook_s`, `driver_bytes`, `communicator_bytes`, `host_update_bytes_per_s`, and the 14 bytes of a logit under torch's FSDP). "
        "They were looked at: where they showed that something was missing (operands of 8 bits that are cast, attention that "
        "stays in 16, the network's share, experts' exchanges between nodes, FSDP in pipelines, its root unit, Megatron's fused loss, updates of all parameters at once), that was added to the model for all rows, from "
        "its own source; how long a scattered sum takes is from a page of halo_b300's authors. So these are errors of a model that knows of these tables, and not of one that never saw them.",
        "",
        "Errors are as in accuracy.md. Each row is predicted by `memadvisor estimate --table` from its own columns.",
        "",
        "## Predicted blind",
        "",
        "These tables were entered and predicted once before an error of theirs was known (*blind*). What they showed was then mended "
        "where physics or the habit of a trainer explains it, for all rows; *today* is after that, and no longer blind. "
        "Rows that were refused then are of *today* alone: 16 of maxtext_tpu, 14 of tpu_recipes, all of gaudi2_llama and paddle_zb_3090, one of torchtune_offload, four of lambda_bert and eight of surogate_lora.",
        "",
        *_blind(frames),
        "## Step time",
        "",
        *_table(frames, "s"),
        "## Memory",
        "",
        *_table(frames, "bytes"),
        "## By what they have in common",
        "",
        *_groups(frames),
        "## Rows far off",
        "",
        f"The worst of those off by more than {_FAR_TIME:.0%} of time or {_FAR_MEMORY:.0%} of memory.".replace(
            "%", " %"
        ),
        "",
    ]
    for published in UNSEEN:
        parts += _far(published.name, frames[published.name])
    parts += ["## Sources", ""]
    parts += [f"- **{each.name}**: {each.source}. {each.note}" for each in UNSEEN]
    return "\n".join(parts) + "\n"


def _blind(frames: Mapping[str, pd.DataFrame]) -> list[str]:
    lines = [
        "| table | time MAPE, blind | bias | Spearman | today | bias | Spearman | memory MAPE, blind | bias | today | bias |",
        f"|{'---|' * 11}",
    ]
    for name, first in (
        FIRST
        | FIRST_FINETUNING
        | FIRST_RECIPES
        | FIRST_MACHINES
        | FIRST_TRAINERS
        | FIRST_COMPARISONS
        | FIRST_SUITES
        | FIRST_LAYOUTS
        | FIRST_KINDS
        | FIRST_TWO_TRAINERS
        | FIRST_CLASSES
        | FIRST_MEASURED
        | FIRST_CONFIRMED
        | FIRST_CAMPAIGNS
        | FIRST_CARDS
        | FIRST_LOGS
        | FIRST_SWEEPS
        | FIRST_OFFLOADS
    ).items():
        frame = frames[name]
        time, memory = (
            errors(frame[f"predicted_{unit}"], frame[f"measured_{unit}"]) for unit in ("s", "bytes")
        )
        shares = (first.time_mape, first.time_bias), (first.memory_mape, first.memory_bias)
        of_time, of_memory = ([_share(first_mape), _signed(first_bias)] for first_mape, first_bias in shares)
        today = ["-", "-", "-"]
        if time.num_rows:
            today = [_share(time.mape), _signed(time.bias), _rank(time.spearman)]
        cells = [name, *of_time, _rank(first.spearman), *today, *of_memory]
        cells += [_share(memory.mape), _signed(memory.bias)] if memory.num_rows else ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _share(value: float | None) -> str:
    return "-" if value is None else _percent(value)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:+.1f} %"


def _rank(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3f}"


def _table(frames: Mapping[str, pd.DataFrame], unit: str) -> list[str]:
    lines = ["| table | rows | MAPE | median | p90 | bias | Spearman |", "|---|---|---|---|---|---|---|"]
    for published in UNSEEN:
        frame = frames[published.name]
        found = errors(frame[f"predicted_{unit}"], frame[f"measured_{unit}"])
        if found.num_rows:
            lines.append(_line(published.name, found))
    whole = pd.concat(frames.values())
    lines.append(_line("all rows", errors(whole[f"predicted_{unit}"], whole[f"measured_{unit}"])))
    missing = {name: int(frame.error.notna().sum()) for name, frame in frames.items()}
    refused = ", ".join(f"{count} of {name}" for name, count in missing.items() if count)
    return [*lines, "", *([f"Rows without a prediction: {refused}.", ""] if refused and unit == "s" else [])]


def _line(name: str, found: Errors) -> str:
    shares = (_percent(each) for each in (found.mape, found.median, found.p90))
    return f"| {name} | {found.num_rows} | {' | '.join(shares)} | {_signed(found.bias)} | {_rank(found.spearman)} |"


def _groups(frames: Mapping[str, pd.DataFrame]) -> list[str]:
    lines = ["| table | of | rows | time MAPE | bias | memory MAPE | bias |", "|---|---|---|---|---|---|---|"]
    for published in UNSEEN:
        for value, rows in frames[published.name].groupby(published.group, sort=True):
            time, memory = (
                errors(rows[f"predicted_{unit}"], rows[f"measured_{unit}"]) for unit in ("s", "bytes")
            )
            cells = " | ".join(
                f"{_percent(each.mape)} | {each.bias * 100:+.1f} %" if each.num_rows else "- | -"
                for each in (time, memory)
            )
            lines.append(f"| {published.name} | {published.group} {value} | {len(rows)} | {cells} |")
    return [*lines, ""]


def _far(name: str, frame: pd.DataFrame) -> list[str]:
    time, memory = (frame[f"predicted_{unit}"] / frame[f"measured_{unit}"] - 1 for unit in ("s", "bytes"))
    badness = pd.concat([time.abs() / _FAR_TIME, memory.abs() / _FAR_MEMORY], axis=1).max(axis=1)
    worst = badness[badness > 1].sort_values(ascending=False).index[:_WORST]
    if worst.empty:
        return []
    told = [column for column in _TOLD if column in frame and frame[column].astype(str).nunique() > 1]
    lines = [
        f"**{name}**, {int((badness > 1).sum())} of {len(frame)}",
        "",
        f"| {' | '.join(told)} | time | memory |",
        f"|{'---|' * (len(told) + 2)}",
    ]
    for place in worst:
        cells = [
            "" if pd.isna(frame.at[place, column]) else _cell(frame.at[place, column]) for column in told
        ]
        offs = ["-" if pd.isna(off[place]) else f"{off[place] * 100:+.0f} %" for off in (time, memory)]
        lines.append(f"| {' | '.join([*cells, *offs])} |")
    return [*lines, ""]


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
