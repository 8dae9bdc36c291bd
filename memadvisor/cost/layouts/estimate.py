"""Memory and time of one training step, from a description of the model, the layout and the machines: nothing is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    stage_contents,
    stage_memory,
    stage_parameters,
)
from memadvisor.cost.layouts.stages import stage_layers
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """All predicted. `first`, `last` and `worst` are pipeline stages; `time_s` sums to `step_time_s`.

    `p_oom`: probability that the worst stage's peak, with what the prediction may be off, is beyond the device's memory.
    """

    step_time_s: float
    time_s: Mapping[str, float]
    first: StageMemory
    last: StageMemory
    worst: StageMemory
    stage_layers: tuple[int, ...]
    memory_bytes: int
    p_oom: float
    mfu: float
    hfu: float

    @property
    def peak_memory_bytes(self) -> float:
        return self.worst.peak_bytes

    @property
    def fits(self) -> bool:
        return self.p_oom < 0.5


def check_layout(model: Architecture, step: TrainingStep, cluster: Cluster) -> None:
    """Raises UsageError for a layout that the model or the cluster cannot have."""
    layout = step.layout
    if layout.num_ranks != cluster.num_accelerators:
        raise UsageError(
            f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} is"
            f" {layout.num_ranks}, and there are {cluster.num_accelerators} accelerators.",
            hint="the product of the four is their number.",
        )
    if model.n_heads % layout.tensor:
        raise UsageError(
            f"{model.n_heads} heads do not part into {layout.tensor}.",
            hint="tensor divides the number of heads.",
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
    model: Architecture, step: TrainingStep, cluster: Cluster, coefficients: Coefficients = FITTED
) -> StepEstimate:
    """Raises UsageError for an impossible layout, or where a figure of the hardware is unknown."""
    check_layout(model, step, cluster)
    layout = step.layout
    device = device_of(cluster.accelerator, step.software.compute_dtype, coefficients)
    tensor, context, data = layout.tensor, layout.context, layout.data
    replicas = data * context

    groups = Groups(
        tensor=group_of(cluster, tensor, 1, coefficients),
        context=group_of(cluster, context, tensor, coefficients),
        expert=group_of(cluster, layout.expert, tensor, coefficients),
    )
    shard = layout.shard_ranks
    replica_groups = ReplicaGroups(
        all=group_of(cluster, replicas, tensor, coefficients),
        shard=group_of(cluster, shard, tensor, coefficients),
        replicate=group_of(cluster, replicas // shard, tensor * shard, coefficients),
        expert=group_of(cluster, max(1, replicas // layout.expert), tensor * layout.expert, coefficients),
    )
    first_layer = layer_work(model, step, 0, device, groups)
    kinds = {False: first_layer, True: first_layer}
    if model.experts is not None:
        kinds = {
            model.has_experts(n): layer_work(model, step, n, device, groups) for n in (0, model.n_layers - 1)
        }
    embedding = embedding_work(model, step, device, groups)
    head = head_work(model, step, device, groups)
    typical = kinds[model.has_experts(model.n_layers - 1)]
    head_in_layers = (head.forward_s + head.backward_s) / (typical.forward_s + typical.backward_s)
    layers = stage_layers(model, layout, step.software, head_in_layers)
    contents = [stage_contents(number, layers, layout.pipeline) for number in range(layout.pipeline)]
    works = [_stage_work(model, held, kinds, embedding, head) for held in contents]
    counts = [stage_parameters(model, step, held) for held in contents]

    forwards, backwards = [], []
    for work, count in zip(works, counts, strict=True):
        forward_traffic, backward_traffic = microbatch_traffic(step, count, replica_groups)
        forwards.append(hidden_seconds(work.forward_s, forward_traffic, coefficients.overlap_slowdown))
        backwards.append(hidden_seconds(work.backward_s, backward_traffic, coefficients.overlap_slowdown))
    message_s = 0.0
    if layout.pipeline > 1:
        activations = 2.0 * layout.micro_batch_size * step.seq_len / context * model.hidden
        message_s = message_seconds(
            cluster,
            activations / (tensor if layout.sequence_parallel else 1),
            tensor * replicas,
            coefficients,
        )
    pipeline_s = _pipeline_seconds(step, forwards, backwards, message_s)
    worst = max(range(layout.pipeline), key=lambda place: forwards[place] + backwards[place])
    busy = layout.num_microbatches * (forwards[worst] + backwards[worst])

    exposed = optimizer = 0.0
    for place, count in enumerate(counts):
        reduce_s, gather_s = step_traffic(step, count, replica_groups)
        exposed = max(
            exposed,
            exposed_step_seconds(step, reduce_s, gather_s, backwards[place], forwards[place], coefficients),
        )
        host = cluster.host.bytes_per_s if cluster.host is not None else None
        optimizer = max(optimizer, optimizer_seconds(step, count, device, host))
    total = pipeline_s + exposed + optimizer + coefficients.step_fixed_s
    work = works[worst]
    times = layout.num_microbatches
    computed = work.forward_s + work.backward_s
    time_s = {
        "matmul": times * work.matmul_s,
        "attention": times * work.attention_s,
        "memory_bound": times * work.stream_s,
        "recompute": times * work.recompute_s,
        "tensor_context_expert_collectives": times * work.collective_s,
        "host": times * work.host_s,
        "sharded_parameters": times * (forwards[worst] + backwards[worst] - computed),
        "pipeline_bubble": pipeline_s - busy,
        "gradients_and_parameters": exposed,
        "optimizer": optimizer + coefficients.step_fixed_s,
    }
    memories = _memories(model, step, contents, coefficients)
    heaviest = max(memories, key=lambda memory: memory.total_bytes)
    peak = device.peak_flops_per_s * layout.num_ranks * total
    return StepEstimate(
        step_time_s=total,
        time_s=time_s,
        first=memories[0],
        last=memories[-1],
        worst=heaviest,
        stage_layers=layers,
        memory_bytes=device.memory_bytes,
        p_oom=_chance_of_more(heaviest, device.memory_bytes, coefficients),
        mfu=model_flops(model, step) / peak,
        hfu=executed_flops(model, step) / peak,
    )


def _stage_work(
    model: Architecture, held: StageContents, kinds: Mapping[bool, Work], embedding: Work, head: Work
) -> Work:
    """Sum of what the stage holds; works are summed field by field."""
    parts: list[tuple[float, Work]] = []
    sparse = sum(model.has_experts(layer) for chunk in held.chunks for layer in chunk)
    dense = sum(len(chunk) for chunk in held.chunks) - sparse
    if dense:
        parts.append((dense, kinds[False]))
    if sparse:
        parts.append((sparse, kinds[True]))
    if held.has_embedding:
        parts.append((1, embedding))
    if held.has_head:
        parts.append((1, head))
    names = Work.__dataclass_fields__
    return Work(**{name: sum(times * getattr(work, name) for times, work in parts) for name in names})


def _pipeline_seconds(
    step: TrainingStep, forwards: list[float], backwards: list[float], message_s: float
) -> float:
    """One microbatch goes through all stages; the others follow at the pace of the slowest one."""
    both = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    slowest = max(both)
    times, chunks = step.layout.num_microbatches, step.layout.chunks
    through = (sum(both) - slowest) / chunks + 2 * (len(both) - 1) * message_s
    return times * slowest + through


def _memories(
    model: Architecture, step: TrainingStep, contents: list[StageContents], coefficients: Coefficients
) -> list[StageMemory]:
    layout = step.layout
    memories = []
    for place, held in enumerate(contents):
        passes = _in_flight(layout.schedule, place, layout.pipeline, layout.chunks, layout.num_microbatches)
        memories.append(stage_memory(model, step, held, passes, 1, coefficients))
    return memories


def _in_flight(schedule: str, place: int, stages: int, chunks: int, times: int) -> float:
    if schedule == "gpipe":
        return times
    if chunks == 1:
        return min(stages - place, times)
    return min(2 * (stages - place - 1) + (chunks - 1) * stages + 1, times * chunks)


def _chance_of_more(memory: StageMemory, capacity_bytes: float, coefficients: Coefficients) -> float:
    """Errors of predicted peaks are taken for log-normal."""
    margin = math.log((capacity_bytes - memory.context_bytes) / memory.peak_bytes)
    return 0.5 * math.erfc(margin / coefficients.memory_sigma / math.sqrt(2.0))
