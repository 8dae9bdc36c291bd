"""Memory and time of one training step, from a description of the model, the layout and the machines: nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.chance import chance_of_more
from memadvisor.cost.layouts.chunks import PricedChunk, price_chunks, sum_of
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.data_parallel import (
    ReplicaGroups,
    exposed_step_seconds,
    optimizer_seconds,
    replica_groups,
    step_traffic,
)
from memadvisor.cost.layouts.flops import executed_flops, halved_model_flops, model_flops
from memadvisor.cost.layouts.kernels import Device, device_of
from memadvisor.cost.layouts.layer_work import Groups as LayerGroups
from memadvisor.cost.layouts.layer_work import layer_groups
from memadvisor.cost.layouts.links import Group, group_of, message_seconds
from memadvisor.cost.layouts.memory import (
    StageContents,
    device_contents,
    stage_memory,
    stage_parameters,
)
from memadvisor.cost.layouts.rank_memory import StageMemory, within
from memadvisor.cost.layouts.stages import stage_layers
from memadvisor.cost.layouts.stalls import message_stall_s, microbatch_stall_s, stalled_costs
from memadvisor.cost.layouts.transposes import on_card
from memadvisor.cost.pipelines.costs import PipelineTimes
from memadvisor.cost.pipelines.schedules import canonical_name
from memadvisor.cost.pipelines.simulate import simulate_pipeline
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import Layout, TrainingStep

# Fits is said only where at most one of ten such layouts runs out of memory: a crash costs more than a little time.
SAFE_P_OOM = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """All predicted. `first`, `last` and `worst` are pipeline stages; `time_s` sums to `step_time_s`.

    `pipeline`: the schedule played. `p_oom`: probability that a stage's peak, with what the prediction may be off, is
    beyond the device's memory, of the stage where that is most likely. `mfu` counts causal attention in full,
    `mfu_halved` half of it.
    """

    step_time_s: float
    time_s: Mapping[str, float]
    first: StageMemory
    last: StageMemory
    worst: StageMemory
    stage_layers: tuple[int, ...]
    pipeline: PipelineTimes
    memory_bytes: int
    p_oom: float
    mfu: float
    mfu_halved: float
    hfu: float

    @property
    def peak_memory_bytes(self) -> float:
        return self.worst.peak_bytes

    @property
    def fits(self) -> bool:
        return self.p_oom < SAFE_P_OOM


def check_layout(model: Architecture, step: TrainingStep, cluster: Cluster) -> None:
    """Raises UsageError for a layout that the model or the cluster cannot have."""
    layout = step.layout
    if layout.num_ranks != cluster.num_accelerators:
        raise UsageError(
            f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} is"
            f" {layout.num_ranks}, and there are {cluster.num_accelerators} accelerators.",
            hint="the product of the four is their number.",
        )
    if step.seq_len % layout.context:
        raise UsageError(
            f"{step.seq_len} tokens do not part into {layout.context}.",
            hint="context divides the sequence's length.",
        )
    is_other = model.experts or model.latent or model.recurrence
    if layout.tensor_kind != "1d" and (is_other or model.n_heads % layout.grid_side):
        raise UsageError(
            f"{model.name} does not part on a {layout.tensor_kind} grid of {layout.grid_side} ranks a line.",
            hint="its heads must divide by that, and experts, latent attention and recurrences go with 1d alone.",
        )
    if (step.target_len is None) == (model.encoder_layers > 0):
        raise UsageError(
            f"{model.name} has {'an encoder and a decoder' if model.encoder_layers else 'one stack of layers'}, and the"
            f" target's length is {'not given' if step.target_len is None else step.target_len}.",
            hint="a source and a target have lengths of their own in encoder-decoders, and only there.",
        )
    if model.encoder_layers and step.software.sample_len is not None:
        raise UsageError(
            "packs of samples of an encoder-decoder are not modelled.", hint="leave their length out."
        )
    if model.encoder_layers and layout.context > 1:
        raise UsageError(
            "context parallelism of an encoder-decoder is not modelled.", hint="use context 1 for it."
        )
    if model.tower is not None and model.tower.images and layout.context > 1:
        raise UsageError(
            "context parallelism of a model with images is not modelled.",
            hint="use context 1 for it, or no images.",
        )
    if layout.expert > 1:
        experts = model.experts.num_experts if model.experts is not None else 0
        if experts == 0 or experts % layout.expert or (layout.data * layout.context) % layout.expert:
            raise UsageError(
                f"{experts} experts do not part among {layout.expert} of {layout.data * layout.context} replicas.",
                hint="expert divides the number of experts, and data x context.",
            )


def estimate_step(
    model: Architecture,
    step: TrainingStep,
    cluster: Cluster,
    coefficients: Coefficients = FITTED,
    *,
    timeline: bool = False,
) -> StepEstimate:
    """`timeline`: the pipeline's every piece of work is kept. Raises UsageError for an impossible layout, or where a figure
    of the hardware is unknown.
    """
    check_layout(model, step, cluster)
    step = on_card(step, cluster.accelerator)
    layout, software = step.layout, step.software
    device = device_of(cluster.accelerator, software.compute_dtype, coefficients)
    groups, replicas = _groups(step, cluster, coefficients)
    layers = stage_layers(model, layout, software)
    chunks = price_chunks(model, step, layers, device, groups, replicas)
    stall_s = message_stall_s(software, cluster.num_nodes)
    pipeline = simulate_pipeline(
        step_schedule(layout),
        stalled_costs([chunk.costs for chunk in chunks], stall_s),
        layout.num_microbatches,
        num_devices=layout.pipeline,
        transfer_s=_transfer_seconds(model, step, cluster, coefficients),
        blocking=not software.overlap_messages,
        timeline=timeline,
    )
    held = _held_by_device(pipeline, chunks, layers)
    time_s = _times(model, step, device, chunks, pipeline, dict.fromkeys(held), replicas, stall_s)
    peaks = list(zip(held, pipeline.peak_held_bytes, strict=True))
    memory_of = {
        (each, held_bytes): within(
            stage_memory(model, step, each.contents, held_bytes, coefficients), device.memory_bytes
        )
        for each, held_bytes in set(peaks)
    }
    memories = [memory_of[peak] for peak in peaks]
    total = pipeline.step_s + time_s["gradients_and_parameters"] + time_s["optimizer"]
    peak = device.peak_flops_per_s * layout.num_ranks * total
    return StepEstimate(
        step_time_s=total,
        time_s=time_s,
        first=memories[0],
        last=memories[-1],
        worst=max(memories, key=lambda memory: memory.total_bytes),
        stage_layers=layers,
        pipeline=pipeline,
        memory_bytes=device.memory_bytes,
        p_oom=max(chance_of_more(memory, device.memory_bytes, coefficients) for memory in memory_of.values()),
        mfu=model_flops(model, step) / peak,
        mfu_halved=halved_model_flops(model, step) / peak,
        hfu=executed_flops(model, step) / peak,
    )


def _groups(
    step: TrainingStep, cluster: Cluster, coefficients: Coefficients
) -> tuple[LayerGroups, ReplicaGroups]:
    """The groups of ranks that layers talk to, and those of replicas."""
    layout = step.layout

    def group(size: int, stride: int) -> Group:
        return group_of(cluster, size, stride, coefficients)

    host_bytes_per_s = None if cluster.host is None else cluster.host.bytes_per_s
    crosses_nodes = layout.pipeline > 1 and cluster.num_nodes > 1
    layer = layer_groups(layout, group, crosses_nodes, whole_experts=step.software.whole_experts)
    return layer, replica_groups(layout, group, host_bytes_per_s)


def _transfer_seconds(
    model: Architecture, step: TrainingStep, cluster: Cluster, coefficients: Coefficients
) -> list[float]:
    """Of the messages between stages: each tensor-parallel rank sends its part of the activations (arXiv:2104.04473, section
    4.1). A decoder's stages pass the encoder's result on."""
    layout = step.layout
    tokens = step.microbatch_tokens + (step.decoded_tokens if model.encoder_layers else 0.0)
    sent_bytes = step.software.element_bytes * (tokens * model.hidden / layout.tensor)
    stride = layout.tensor * layout.data * layout.context
    return message_seconds(cluster, sent_bytes, layout.pipeline, stride, coefficients)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What a device holds; all devices whose chunks are alike have one, since they hold and do the same."""

    contents: StageContents
    chunks: Sequence[PricedChunk]


def _held_by_device(
    pipeline: PipelineTimes, chunks: Sequence[PricedChunk], layers: tuple[int, ...]
) -> list[_Held]:
    known: dict[tuple[int, ...], _Held] = {}
    found = []
    for numbers in pipeline.chunks:
        key = tuple(id(chunks[number]) for number in numbers)
        if key not in known:
            known[key] = _Held(device_contents(numbers, layers), [chunks[number] for number in numbers])
        found.append(known[key])
    return found


def _times(
    model: Architecture,
    step: TrainingStep,
    device: Device,
    chunks: list[PricedChunk],
    pipeline: PipelineTimes,
    held_once: Iterable[_Held],
    groups: ReplicaGroups,
    stall_s: float,
) -> dict[str, float]:
    """Seconds of a step by what the busiest device does, and by what it waits for. `held_once`: what devices hold, those
    that are alike once. `stall_s`: by which each message is longer."""
    known = device.coefficients
    exposed = optimizer = 0.0
    for held in held_once:
        count = stage_parameters(model, step, held.contents)
        reduce_s, gather_s = step_traffic(step, count, groups)
        costs = [chunk.costs for chunk in held.chunks]
        forward = sum(cost.forward_s for cost in costs)
        backward = sum(cost.input_backward_s + cost.weight_backward_s for cost in costs)
        exposed = max(exposed, exposed_step_seconds(step, reduce_s, gather_s, backward, forward, known))
        optimizer = max(optimizer, optimizer_seconds(step, count, device, groups.host_bytes_per_s))
    busiest = max(range(len(pipeline.chunks)), key=lambda place: pipeline.busy_s[place])
    passes = step.layout.num_microbatches / pipeline.weight_copies
    work = sum_of([(passes, chunks[chunk].work) for chunk in pipeline.chunks[busiest]])
    stalls_s = passes * microbatch_stall_s(pipeline.chunks[busiest], len(chunks), stall_s)
    own_s = work.forward_s + work.backward_s + stalls_s
    return {
        "matmul": work.matmul_s,
        "attention": work.attention_s,
        **({"recurrence": work.recurrence_s} if model.recurrence is not None else {}),
        "memory_bound": work.stream_s,
        "recompute": work.recompute_s,
        "tensor_context_expert_collectives": work.collective_s,
        "host": work.host_s + stalls_s,
        "sharded_parameters": max(0.0, pipeline.busy_s[busiest] - own_s),
        "pipeline_bubble": max(0.0, pipeline.step_s - pipeline.busy_s[busiest]),
        "gradients_and_parameters": exposed,
        "optimizer": optimizer + known.step_fixed_s,
    }


def step_schedule(layout: Layout) -> str:
    """The schedule's name as the simulator has it; 1F1B with several chunks a device is the interleaved one."""
    name = canonical_name(layout.schedule)
    return "interleaved" if name == "1f1b" and layout.chunks > 1 else name
