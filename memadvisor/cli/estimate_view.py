"""How `memadvisor estimate` shows a prediction: a few lines and two small tables, or JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.architecture import VisionTower
from memadvisor.cli.model_words import adapter_words, kind_words, model_lines, pack_words
from memadvisor.cost.layouts.estimate import StepEstimate
from memadvisor.cost.layouts.rank_memory import StageMemory
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.read import LayoutCase
from memadvisor.planning.predict_layouts import LayoutPrediction
from memadvisor.software_traits import Software
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds

COMPONENTS = tuple(field.name for field in dataclasses.fields(StageMemory))


def print_estimate(case: LayoutCase, prediction: LayoutPrediction, console: Console) -> None:
    """Everything that it says is predicted from data sheets (or the hardware file) and says so."""
    step, estimate = prediction.step, prediction.estimate
    for line in _head(case, step) + _answer(case, step, estimate):
        console.print(Text(line), soft_wrap=True)
    console.print(_memory_table(step.layout, estimate))
    console.print(_time_table(estimate))


def _head(case: LayoutCase, step: TrainingStep) -> list[str]:
    return [
        *model_lines(case.architecture, step, case.cluster),
        f"layout     {layout_words(step.layout)}; {_code_words(step.software)}"
        + ("; micro-batch chosen" if case.micro_batch_is_open else ""),
        *adapter_words(case.architecture, step.software.lora),
    ]


def _code_words(software: Software) -> str:
    words = [software.compute_dtype, f"{software.name} code"]
    if software.paged_bytes:
        words.append("optimizer state paged to the host where there is no room (its time is not counted)")
    if software.updates_in_backward:
        words.append("updates in the backward")
    return ", ".join(words) + pack_words(software)


_ZEROPP_WORDS = {"hpz": "hpZ", "qwz": "qwZ (8 bits, lossy)", "qgz": "qgZ (4 bits, lossy)"}


def layout_words(layout: Layout) -> str:
    """`dp 4 x tp 2 x pp 2, ZeRO 1, ...`, without what is not used."""
    degrees = [("dp", layout.data), ("tp", layout.tensor), ("pp", layout.pipeline), ("cp", layout.context)]
    words = [" x ".join(f"{name} {size}" for name, size in degrees if size > 1 or name == "dp")]
    if layout.tensor_kind != "1d":
        depth = f" of depth {layout.tensor_depth}" if layout.tensor_depth > 1 else ""
        words.append(f"tensor parallel on a {layout.tensor_kind} grid{depth}")
    if layout.expert > 1:
        words.append(f"ep {layout.expert}")
    if layout.zero_stage:
        shard = "" if layout.shard is None else f" in groups of {layout.shard}"
        words.append(f"ZeRO {layout.zero_stage}{shard}")
    words += [_ZEROPP_WORDS[name] for name in layout.zeropp]
    plural = "" if layout.num_microbatches == 1 else "es"
    words.append(f"{layout.num_microbatches} microbatch{plural} of {layout.micro_batch_size}")
    if layout.pipeline > 1:
        words.append(layout.schedule + (f" of {layout.chunks} chunks" if layout.chunks > 1 else ""))
    if layout.stage_layers is not None:
        words.append(f"stages of {'+'.join(map(str, layout.stage_layers))} layers")
    if layout.sequence_parallel:
        words.append("sequence parallel")
    part = f" of {layout.recompute_share:.0%} of the layers" if layout.recompute_share < 1 else ""
    words.append(
        "no recomputation" if layout.recompute == "none" else f"{layout.recompute} recomputation{part}"
    )
    offloaded = [
        name
        for name, on in (("optimizer", layout.offload_optimizer), ("parameters", layout.offload_parameters))
        if on
    ]
    if layout.offload_activations:
        offloaded.append(f"{layout.offload_activations:.0%} of activations")
    if offloaded:
        words.append(f"on the host: {', '.join(offloaded)}")
    return ", ".join(words)


# Above the one the likelier end is that memory runs out; above the other nearly all such layouts do (docs/accuracy.md).
_EVEN_P_OOM, _SURE_P_OOM = 0.5, 0.9

_NEXT = (
    "next       with --batch N in place of a layout all layouts are searched for the fastest that fits; "
    "--largest names the largest that fits",
)


def _verdict(estimate: StepEstimate) -> str:
    if estimate.fits:
        return "fits"
    if estimate.p_oom < _EVEN_P_OOM:
        return "may not fit"
    return "likely does not fit" if estimate.p_oom < _SURE_P_OOM else "does not fit"


def _answer(case: LayoutCase, step: TrainingStep, estimate: StepEstimate) -> list[str]:
    rate = step.tokens / estimate.step_time_s
    worst = format_bytes(estimate.worst.total_bytes)
    peak = case.cluster.accelerator.peak_flops_per_s[step.software.compute_dtype]
    mfu, halved = format_fraction(estimate.mfu), format_fraction(estimate.mfu_halved)
    halved = "" if halved == mfu else f" ({halved} with causal attention halved)"
    return [
        f"predicted  step {format_seconds(estimate.step_time_s)}, {format_count(rate)} tokens/s "
        f"({format_count(rate / step.layout.num_ranks)} each); MFU {mfu}"
        f"{halved}, HFU {format_fraction(estimate.hfu)},"
        f" of {format_count(peak, 'FLOP/s')} each",
        f"predicted  {_verdict(estimate)}: {worst} of {format_bytes(estimate.memory_bytes)} on the fullest rank, "
        f"{format_fraction(estimate.p_oom)} chance of running out",
        *(_NEXT if estimate.p_oom >= _EVEN_P_OOM else ()),
    ]


def _memory_table(layout: Layout, estimate: StepEstimate) -> Table:
    stages = {"a rank": estimate.worst}
    if layout.pipeline > 1:
        stages = {"first stage": estimate.first, "last stage": estimate.last, "worst stage": estimate.worst}
    table = Table(title="Predicted memory", title_justify="left", show_footer=True)
    table.add_column("", footer="sum")
    for name, memory in stages.items():
        table.add_column(name, justify="right", footer=format_bytes(memory.total_bytes))
    for component in COMPONENTS:
        values = [getattr(memory, component) for memory in stages.values()]
        if any(values):
            table.add_row(
                component.removesuffix("_bytes").replace("_", " "), *(format_bytes(value) for value in values)
            )
    return table


# What is left where sums of a step's parts are taken from each other: no part of it takes so little.
_ROUNDING_S = 1e-12


def _time_table(estimate: StepEstimate) -> Table:
    table = Table(title="Predicted time of a step", title_justify="left", show_footer=True)
    table.add_column("", footer="sum")
    table.add_column("time", justify="right", footer=format_seconds(estimate.step_time_s))
    table.add_column("share", justify="right", footer="100.0 %")
    for component, duration_s in estimate.time_s.items():
        if duration_s > _ROUNDING_S:
            share = format_fraction(duration_s / estimate.step_time_s)
            table.add_row(component.replace("_", " "), format_seconds(duration_s), share)
    return table


def estimate_to_json(case: LayoutCase, prediction: LayoutPrediction) -> dict[str, Any]:
    """The stable JSON of docs/json.md. Every figure is predicted, but for `cluster` and `model`."""
    step, estimate, model = prediction.step, prediction.estimate, case.architecture
    return {
        "format": 1,
        "model": {
            "name": model.name,
            "num_params": model.num_parameters(),
            "num_active_params": model.active_parameters(),
            "layer_kinds": [
                {"layers": kind_words(model, layer), "num_layers": count}
                for count, layer in model.kinds().values()
            ],
            "tower": None if model.tower is None else _tower_to_json(model.tower),
            "left_out": model.left_out or None,
        },
        "cluster": _cluster_to_json(case.cluster),
        "layout": dataclasses.asdict(step.layout),
        "software": dataclasses.asdict(step.software),
        "seq_len": step.seq_len,
        "global_batch_seqs": step.global_batch_sequences,
        "predicted": {
            "step_time_s": estimate.step_time_s,
            "tokens_per_s": step.tokens / estimate.step_time_s,
            "mfu": estimate.mfu,
            "mfu_halved": estimate.mfu_halved,
            "hfu": estimate.hfu,
            "peak_memory_bytes": round(estimate.peak_memory_bytes),
            "total_memory_bytes": round(estimate.worst.total_bytes),
            "budget_bytes": estimate.memory_bytes,
            "fits": estimate.fits,
            "p_oom": estimate.p_oom,
            "time_s": dict(estimate.time_s),
            "memory_bytes": {
                name: {part.removesuffix("_bytes"): round(getattr(stage, part)) for part in COMPONENTS}
                for name, stage in (
                    ("first", estimate.first),
                    ("last", estimate.last),
                    ("worst", estimate.worst),
                )
            },
        },
    }


def _tower_to_json(tower: VisionTower) -> dict[str, Any]:
    return {
        "num_params": tower.num_parameters(),
        "num_layers": tower.stack.n_layers,
        "hidden": tower.stack.hidden,
        "is_trained": tower.is_trained,
        "images": tower.images,
        "image_tokens": tower.image_tokens,
        "patches": tower.patches if tower.image_tokens else None,
    }


def _cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    hardware = cluster.accelerator

    def link(tier: Link | None) -> dict[str, Any] | None:
        return None if tier is None else dataclasses.asdict(tier)

    return {
        "accelerator": hardware.name,
        "kind": hardware.kind,
        "source": hardware.source,
        "num_nodes": cluster.num_nodes,
        "per_node": cluster.per_node,
        "inside": link(cluster.inside),
        "across": link(cluster.across),
        "host": link(cluster.host),
    }
