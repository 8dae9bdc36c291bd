"""Memory and time of one training step, from a description of the model, the layout and the machines: nothing is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.data_parallel import (
    ReplicaGroups,
    exposed_step_seconds,
    hidden_seconds,
    microbatch_traffic,
    optimizer_seconds,
    step_traffic,
)
from memadvisor.cost.layouts.flops import executed_flops, model_flops
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import Groups, Work, embedding_work, head_work, layer_work
from memadvisor.cost.layouts.links import group_of, message_seconds
from memadvisor.cost.layouts.memory import (
    StageContents,
    StageMemory,
    StageParameters,
    device_contents,
    stage_memory,
    stage_parameters,
)
from memadvisor.cost.layouts.saved import layer_saved_bytes, layer_weight_input_bytes
from memadvisor.cost.layouts.stages import stage_layers
from memadvisor.cost.pipelines.costs import ChunkCosts, PipelineTimes
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

    `pipeline`: the schedule played. `p_oom`: probability that the worst stage's peak, with what the prediction may be off, is beyond the device's memory.
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
    layout = step.layout
    device = device_of(cluster.accelerator, step.software.compute_dtype, coefficients)
    tensor, context, data = layout.tensor, layout.context, layout.data
    replicas = data * context

    groups = Groups(
        tensor=group_of(cluster, tensor, 1, coefficients),
        context=group_of(cluster, context, tensor, coefficients),
        expert=group_of(cluster, layout.expert, tensor, coefficients),
        pipeline_crosses_nodes=layout.pipeline > 1 and cluster.num_nodes > 1,
    )
    shard = layout.shard_ranks
    replica_groups = ReplicaGroups(
        all=group_of(cluster, replicas, tensor, coefficients),
        shard=group_of(cluster, shard, tensor, coefficients),
        replicate=group_of(cluster, replicas // shard, tensor * shard, coefficients),
        expert=group_of(cluster, max(1, replicas // layout.expert), tensor * layout.expert, coefficients),
    )
    kinds = {
        model.has_experts(layer): layer_work(model, step, layer, device, groups)
        for layer in {0, model.n_layers - 1}
    }
    embedding = embedding_work(model, step, device, groups)
    head = head_work(model, step, device, groups)
    head_in_layers = model.head_parameters() / model.layer_parameters(model.n_layers - 1)
    layers = stage_layers(model, layout, step.software, head_in_layers)
    works = [
        _chunk_work(model, device_contents((chunk,), layers), kinds, embedding, head)
        for chunk in range(len(layers))
    ]
    chunk_counts = [
        stage_parameters(model, step, device_contents((chunk,), layers)) for chunk in range(len(layers))
    ]
    costs = [
        _chunk_costs(model, step, work, count, replica_groups, layers, chunk, coefficients)
        for chunk, (work, count) in enumerate(zip(works, chunk_counts, strict=True))
    ]
    activations = 2.0 * layout.micro_batch_size * step.seq_len / context * model.hidden
    message_bytes = activations / (tensor if layout.sequence_parallel else 1)
    pipeline = simulate_pipeline(
        step_schedule(layout),
        costs,
        layout.num_microbatches,
        num_devices=layout.pipeline,
        transfer_s=message_seconds(cluster, message_bytes, layout.pipeline, tensor * replicas, coefficients),
        blocking=not step.software.overlap_messages,
        timeline=timeline,
    )
    worst = max(range(layout.pipeline), key=lambda place: pipeline.busy_s[place])
    contents = [device_contents(chunks, layers) for chunks in pipeline.chunks]
    counts = [stage_parameters(model, step, held) for held in contents]
    passes = layout.num_microbatches / pipeline.weight_copies

    exposed = optimizer = 0.0
    host = cluster.host.bytes_per_s if cluster.host is not None else None
    for chunks, count in zip(pipeline.chunks, counts, strict=True):
        reduce_s, gather_s = step_traffic(step, count, replica_groups)
        forward = sum(costs[chunk].forward_s for chunk in chunks)
        backward = sum(costs[chunk].input_backward_s + costs[chunk].weight_backward_s for chunk in chunks)
        exposed = max(
            exposed, exposed_step_seconds(step, reduce_s, gather_s, backward, forward, coefficients)
        )
        optimizer = max(optimizer, optimizer_seconds(step, count, device, host))
    total = pipeline.step_s + exposed + optimizer + coefficients.step_fixed_s
    work = _sum_of([(passes, works[chunk]) for chunk in pipeline.chunks[worst]])
    time_s = {
        "matmul": work.matmul_s,
        "attention": work.attention_s,
        "memory_bound": work.stream_s,
        "recompute": work.recompute_s,
        "tensor_context_expert_collectives": work.collective_s,
        "host": work.host_s,
        "sharded_parameters": max(0.0, pipeline.busy_s[worst] - work.forward_s - work.backward_s),
        "pipeline_bubble": pipeline.step_s - pipeline.busy_s[worst],
        "gradients_and_parameters": exposed,
        "optimizer": optimizer + coefficients.step_fixed_s,
    }
    memories = [
        stage_memory(model, step, held, held_bytes, coefficients)
        for held, held_bytes in zip(contents, pipeline.peak_held_bytes, strict=True)
    ]
    heaviest = max(memories, key=lambda memory: memory.total_bytes)
    peak = device.peak_flops_per_s * layout.num_ranks * total
    return StepEstimate(
        step_time_s=total,
        time_s=time_s,
        first=memories[0],
        last=memories[-1],
        worst=heaviest,
        stage_layers=layers,
        pipeline=pipeline,
        memory_bytes=device.memory_bytes,
        p_oom=chance_of_more(heaviest, device.memory_bytes, coefficients),
        mfu=model_flops(model, step) / peak,
        hfu=executed_flops(model, step) / peak,
    )


def step_schedule(layout: Layout) -> str:
    """The schedule's name as the simulator has it; 1F1B with several chunks a device is the interleaved one."""
    name = canonical_name(layout.schedule)
    return "interleaved" if name == "1f1b" and layout.chunks > 1 else name


def _chunk_work(
    model: Architecture, held: StageContents, kinds: Mapping[bool, Work], embedding: Work, head: Work
) -> Work:
    parts: list[tuple[float, Work]] = [
        (sum(model.has_experts(layer) == sparse for layer in held.layers), work)
        for sparse, work in kinds.items()
    ]
    return _sum_of([*parts, (held.embeddings, embedding), (held.heads, head)])


def _sum_of(parts: list[tuple[float, Work]]) -> Work:
    """Field by field."""
    return Work(**{name: sum(times * getattr(work, name) for times, work in parts) for name in _FIELDS})


_FIELDS = tuple(field.name for field in fields(Work))


def _chunk_costs(
    model: Architecture,
    step: TrainingStep,
    work: Work,
    count: StageParameters,
    groups: ReplicaGroups,
    layers: tuple[int, ...],
    chunk: int,
    known: Coefficients,
) -> ChunkCosts:
    """One microbatch on one chunk, gathers and reductions of sharded parameters under it."""
    gather_s, backward_traffic_s = microbatch_traffic(step, count, groups)
    backward_s = hidden_seconds(work.backward_s, backward_traffic_s, known.overlap_slowdown)
    start = sum(layers[:chunk])
    saved = sum(layer_saved_bytes(model, step, layer) for layer in range(start, start + layers[chunk]))
    inputs = sum(
        layer_weight_input_bytes(model, step, layer) for layer in range(start, start + layers[chunk])
    )
    return ChunkCosts(
        forward_s=hidden_seconds(work.forward_s, gather_s, known.overlap_slowdown),
        input_backward_s=backward_s - work.weight_s,
        weight_backward_s=work.weight_s,
        activation_bytes=round(saved),
        weight_activation_bytes=round(min(saved, inputs)),
    )


def chance_of_more(memory: StageMemory, capacity_bytes: float, coefficients: Coefficients) -> float:
    """Errors of predicted peaks are taken for log-normal."""
    margin = math.log((capacity_bytes - memory.context_bytes) / memory.peak_bytes)
    return 0.5 * math.erfc(margin / coefficients.memory_sigma / math.sqrt(2.0))
