"""Options of `memadvisor estimate` that say how a layout is spread and how its code goes about it."""

from __future__ import annotations

import argparse
from dataclasses import replace

from memadvisor.errors import UsageError
from memadvisor.layout import RECOMPUTE, TENSOR_KINDS
from memadvisor.layout_table.adapters import widens
from memadvisor.lora import LINEAR, Lora, base_named, targets_named
from memadvisor.schedule_names import SCHEDULES
from memadvisor.software import PRESETS
from memadvisor.software_dtypes import with_lora
from memadvisor.software_torch import UNSLOTH
from memadvisor.software_traits import Preset, Software


def add_layout(group: argparse._ArgumentGroup) -> None:
    _add_degrees(group)
    _add_ways(group)


def _add_degrees(group: argparse._ArgumentGroup) -> None:
    """Over how many ranks each dimension goes."""
    group.add_argument("--dp", type=int, metavar="N", help="replicas (default: what the others leave)")
    group.add_argument("--tp", type=int, metavar="N", help="tensor parallel ranks")
    group.add_argument(
        "--tp-kind", choices=TENSOR_KINDS, help="matrices split along one dimension, or on a grid of ranks"
    )
    group.add_argument("--tp-depth", type=int, metavar="N", help="grids of --tp-kind 2.5d")
    group.add_argument(
        "--widest-tp",
        type=int,
        metavar="N",
        help="in a search: most tensor parallel ranks, over whole nodes (default: one node's)",
    )
    group.add_argument("--pp", type=int, metavar="N", help="pipeline stages")
    group.add_argument("--cp", type=int, metavar="N", help="context parallel ranks")
    group.add_argument("--ep", type=int, metavar="N", help="expert parallel ranks")
    group.add_argument(
        "--expert-imbalance", type=float, metavar="X",
        help="tokens of the fullest expert-parallel rank over the mean, or the capacity factor (default: 1)",
    )  # fmt: skip
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage")
    group.add_argument(
        "--shard", type=int, metavar="N", help="replicas among which ZeRO shards (default: all)"
    )
    group.add_argument(
        "--zeropp",
        metavar="LIST",
        help="hpz,qwz,qgz of ZeRO++, with ZeRO 3; in a search: any of them may be used",
    )


def _add_ways(group: argparse._ArgumentGroup) -> None:
    """How each rank works on its part."""
    group.add_argument(
        "--micro-batch", type=int, metavar="N", help="sequences (default: the fastest that fits)"
    )
    group.add_argument(
        "--recompute", choices=RECOMPUTE, default="none", help="what the backward computes again"
    )
    group.add_argument(
        "--recompute-layers",
        type=int,
        metavar="N",
        help="with --recompute full: of the layers of each part of the model on a pipeline rank (default: all)",
    )
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}; several with commas where all layouts are searched",
    )
    group.add_argument("--chunks", type=int, metavar="N", help="parts of the model on each pipeline rank")
    group.add_argument(
        "--split",
        choices=("even", "balanced"),
        help="layers of a stage: equal numbers, or by their modelled costs (default: as the code does)",
    )
    group.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="with --tp (default: as the code does)",
    )
    group.add_argument(
        "--context-kind", choices=("ring", "ulysses"), default="ring", help="how --cp shares attention"
    )
    group.add_argument("--offload-optimizer", action="store_true", help="optimizer state on the host")
    group.add_argument("--offload-parameters", action="store_true", help="parameters on the host")
    group.add_argument(
        "--offload-activations",
        type=float,
        metavar="SHARE",
        help="0 to 1, on the host (default: as the code does)",
    )


def add_code(group: argparse._ArgumentGroup) -> None:
    names = ", ".join(preset.names[0] for preset in PRESETS)
    group.add_argument("--framework", metavar="NAME", help=f"whose habits: {names}")
    group.add_argument("--precision", metavar="NAME", help="bf16, fp16, fp8, tf32, fp32, amp-bf16, amp-fp16")
    group.add_argument("--attention", metavar="NAME", help="flash or unfused")
    group.add_argument(
        "--model-code", metavar="NAME", help="fused (the trainer's), or reference: Hugging Face's class"
    )
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        help="adamw, adam8bit, sgd, momentum, lion, muon, paged_adamw_32bit, ...",
    )
    group.add_argument(
        "--optimizer-in-backward",
        action="store_true",
        help="each gradient updates its parameter at once, and is let go",
    )
    group.add_argument(
        "--sample-len",
        type=int,
        metavar="N",
        help="sequences are packs of samples of N tokens, each of which sees itself alone (an average over tokens)",
    )
    group.add_argument(
        "--lora-rank", type=int, metavar="R", help="train low-rank adapters beside frozen matrices, of rank R"
    )
    group.add_argument(
        "--lora-targets",
        metavar="LIST",
        help="matrices that have one: query,key,value,output,gate,up,down, attention, mlp, all (default: all)",
    )
    group.add_argument("--lora-dropout", action="store_true", help="dropout before the adapters")
    group.add_argument(
        "--lora-embeddings", action="store_true", help="copies of the embedding and the head are trained too"
    )
    group.add_argument(
        "--quantized-base",
        metavar="NAME",
        help="frozen matrices of layers in nf4, nf4-dq, int8 or int4 (GPTQ, AWQ); with --lora-rank",
    )


def offloaded_activations(arguments: argparse.Namespace, preset: Preset) -> float:
    """What is said, else what the trainer does where everything runs again."""
    said: float | None = arguments.offload_activations
    return said if said is not None else float(preset.offloads_recomputed and arguments.recompute == "full")


def packed(arguments: argparse.Namespace, software: Software) -> Software:
    """The same code on packs of the samples that the option names."""
    return software if arguments.sample_len is None else replace(software, sample_len=arguments.sample_len)


def adapted(arguments: argparse.Namespace, software: Software) -> Software:
    """The same code with the adapters that the options name. Raises UsageError where options of adapters have no rank."""
    options = ("lora_targets", "lora_dropout", "lora_embeddings", "quantized_base")
    if arguments.lora_rank is None:
        for option in options:
            if getattr(arguments, option):
                raise UsageError(
                    f"--{option.replace('_', '-')} goes with --lora-rank.",
                    hint="add a rank, as --lora-rank 16, or leave it out.",
                )
        return software
    plain = "fp32" if software.compute_dtype in ("float32", "tf32") else "16bit"
    base = plain if arguments.quantized_base is None else base_named(arguments.quantized_base)
    lora = Lora(
        rank=arguments.lora_rank,
        targets=LINEAR if arguments.lora_targets is None else targets_named(arguments.lora_targets),
        dropout=arguments.lora_dropout,
        base=base,
        widened=widens(arguments.framework or "", software, base),
        shares_inputs=software.name == UNSLOTH.software.name,
        trains_ends=arguments.lora_embeddings,
    )
    return with_lora(software, lora)
