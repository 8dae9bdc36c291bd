"""How `memadvisor estimate` names the model and the machines that a prediction is of."""

from __future__ import annotations

from memadvisor.architecture import Architecture, VisionTower
from memadvisor.cost.layouts.adapters import adapter_parameters
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import TrainingStep
from memadvisor.lora import LINEAR, Lora
from memadvisor.software_traits import Software
from memadvisor.units import format_count


def model_lines(model: Architecture, step: TrainingStep, cluster: Cluster) -> list[str]:
    """What the model is, what of it is counted, and on what machines."""
    return [
        f"model      {size_words(model)}; {length_words(step.seq_len, step.target_len)} x {batch_words(step.global_batch_sequences)} a step",
        f"cluster    {cluster_words(cluster)}",
        *part_lines(model),
    ]


def size_words(model: Architecture) -> str:
    size = f"{model.name}: {format_count(model.num_parameters())} parameters"
    return size if model.experts is None else f"{size} ({format_count(model.active_parameters())} active)"


def length_words(seq_len: int, target_len: int | None) -> str:
    return f"{seq_len} tokens" if target_len is None else f"{seq_len} + {target_len} tokens"


def batch_words(sequences: int) -> str:
    return f"{sequences} sequence{'' if sequences == 1 else 's'}"


def part_lines(model: Architecture) -> list[str]:
    """Nothing of a model whose layers are all of attention and one kind of block."""
    return [*_layer_words(model), *tower_words(model)]


# Of models with such a recurrence (docs/accuracy-unseen.md).
_COMPARED_STEPS = {"mamba2": "five published steps", "gated_delta_net": "13 published steps"}


def pack_words(software: Software) -> str:
    """Of sequences that several samples share."""
    return "" if software.sample_len is None else f", packs of samples of {software.sample_len} tokens"


def _layer_words(model: Architecture) -> list[str]:
    """Of a model whose layers differ, or have recurrences."""
    kinds = model.kinds()
    if model.recurrence is None and len(kinds) < 2:
        return []
    words = [f"{count} of {kind_words(model, layer)}" for count, layer in kinds.values()]
    compared = ""
    if model.recurrence is not None:
        steps = _COMPARED_STEPS.get(model.recurrence.kind, "no measured step")
        compared = f"; recurrences by their kernels, compared with {steps}"
    return [f"layers     {', '.join(words)}{compared}"]


_RECURRENCES = {
    "gated_delta_net": "gated delta net",
    "kimi_delta": "Kimi delta attention",
    "lightning": "lightning attention",
    "mamba2": "Mamba 2",
    "mamba": "Mamba",
    "short_convolution": "short convolution",
}


def kind_words(model: Architecture, layer: int) -> str:
    """`attention and experts`."""
    parts = []
    if model.has_attention(layer):
        window = model.window_of(layer)
        attention = f"attention to {window} tokens" if window else "attention"
        parts.append(f"{attention} and cross attention" if model.has_cross_attention(layer) else attention)
    if model.recurrence is not None and model.has_recurrence(layer):
        parts.append(_RECURRENCES[model.recurrence.kind])
    if model.has_feed_forward(layer):
        parts.append("experts" if model.has_experts(layer) else "a dense block")
    return " and ".join(parts)


def adapter_words(model: Architecture, lora: Lora | None) -> list[str]:
    if lora is None:
        return []
    kinds = model.kinds().values()
    trained = sum(count * sum(adapter_parameters(model, lora, layer, 1)) for count, layer in kinds)
    ends = ", and copies of the embedding and the head" if lora.trains_ends else ""
    has_all = model.recurrence is not None and set(LINEAR) <= set(lora.targets)
    recurrences = ", and recurrences' matrices" if has_all else ""
    return [
        f"trained    LoRA of rank {lora.rank} beside {', '.join(lora.targets)}{recurrences}: {format_count(trained)} parameters{ends};"
        f" the frozen ones in {lora.base}"
    ]


def cluster_words(cluster: Cluster) -> str:
    hardware = cluster.accelerator
    words = f"{cluster.num_accelerators} x {hardware.name} ({hardware.kind} rates)"
    if cluster.num_nodes > 1:
        words += f" in {cluster.num_nodes} nodes"
    for where, link in (("inside", cluster.inside), ("across", cluster.across)):
        if link is not None:
            words += f"; {where} {link.kind} {format_count(link.bytes_per_s, 'B/s')}"
    if cluster.across is not None:
        words += f" each ({cluster.across.source.split(':')[0]})"
    return words


def tower_words(model: Architecture) -> list[str]:
    """A line, where there is a tower or something that is not counted."""
    words = []
    if model.tower is not None:
        words.append(f"images     {_tower(model.tower)}")
    if model.left_out:
        words.append(f"left out   {model.left_out} of {model.name}: the language model alone is counted")
    return words


def _tower(tower: VisionTower) -> str:
    stack = tower.stack
    size = f"a tower of {stack.n_layers} layers, {stack.hidden} wide, {format_count(tower.num_parameters())} parameters"
    trained = "trained" if tower.is_trained else "frozen"
    if not tower.images:
        return f"{size}, {trained}; no image is counted (--images N)"
    plural = "" if tower.images == 1 else "s"
    return f"{size}, {trained}; {tower.images} image{plural} of {tower.image_tokens} tokens ({tower.patches} patches) in each sequence"
