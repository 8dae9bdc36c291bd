"""Seconds of one step that go to gradients, parameters and the optimizer, beside the microbatches themselves.

Traffic of the ZeRO stages: arXiv:1910.02054, section 7. What can go on under computation does, which slows the computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.kernels import Device, stream_seconds
from memadvisor.cost.layouts.links import Group
from memadvisor.cost.layouts.memory import StageParameters, frozen_bytes, state_bytes
from memadvisor.cost.layouts.zeropp import (
    Hops,
    backward_gather_seconds,
    forward_gather_seconds,
    hops_of,
    reduce_seconds,
    updated_bytes,
)
from memadvisor.cost.pipelines.groups import passes_beside
from memadvisor.errors import UsageError
from memadvisor.layout import Layout, TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroups:
    """`shard` shares what is sharded, `replicate` holds the same shards; `all` are all replicas. `experts`: all that hold the
    same experts, `expert_shard` and `expert_replicate` are of those.
    `shard_hops`, `expert_hops`: what ZeRO++ parts the two of these that share shards into.
    `host_bytes_per_s`: of the link to the host's memory, None where it is not known."""

    all: Group
    shard: Group
    replicate: Group
    experts: Group
    expert_shard: Group
    expert_replicate: Group
    shard_hops: Hops
    expert_hops: Hops
    host_bytes_per_s: float | None


def replica_groups(
    layout: Layout, group: Callable[[int, int], Group], host_bytes_per_s: float | None
) -> ReplicaGroups:
    """`group`: of so many ranks, so far apart."""
    replicas, shard, tensor = layout.data * layout.context, layout.shard_ranks, layout.tensor
    holders, expert_shard, apart = (
        max(1, replicas // layout.expert),
        layout.expert_shard_ranks,
        tensor * layout.expert,
    )
    sharing, holding = group(shard, tensor), group(expert_shard, apart)
    return ReplicaGroups(
        all=group(replicas, tensor),
        shard=sharing,
        replicate=group(replicas // shard, tensor * shard),
        experts=group(holders, apart),
        expert_shard=holding,
        expert_replicate=group(max(1, holders // expert_shard), apart * expert_shard),
        shard_hops=hops_of(sharing, group, tensor, layout.secondary_shard or 1),
        expert_hops=hops_of(holding, group, apart, layout.expert_secondary_ranks),
        host_bytes_per_s=host_bytes_per_s,
    )


def hidden_seconds(compute_s: float, collective_s: float, slowdown: float) -> float:
    """Computation and collectives at once: what both run is slower by `slowdown`, the longer one's rest runs alone."""
    both = min(compute_s, collective_s)
    return max(compute_s, collective_s) + slowdown * both


def microbatch_traffic(
    step: TrainingStep, count: StageParameters, groups: ReplicaGroups
) -> tuple[float, float]:
    """Seconds of collectives that each microbatch's forward and backward bring, when parameters are sharded, unit by unit;
    and of their way from the host, when they are there (Rajbhandari et al. 2021, arXiv:2104.07857). Raises UsageError where
    the link to the host is not known."""
    layout, software = step.layout, step.software
    fetch = 0.0
    if layout.offload_parameters:
        if groups.host_bytes_per_s is None:
            raise UsageError(
                "parameters are on the host, and the link to it is not known.",
                hint="give [host] in a cluster file.",
            )
        size_bytes = (
            count.all / (layout.shard_ranks if layout.zero_stage == 3 else 1) * software.parameter_bytes
        )
        if count.trained is not None:
            size_bytes = frozen_bytes(software).of(count, layout, is_sharded=layout.zero_stage == 3)
        fetch = size_bytes / groups.host_bytes_per_s
    if layout.zero_stage < 3:
        return fetch, fetch
    parts = (
        (groups.shard_hops, count.shared, count.units),
        (groups.expert_hops, count.experts, count.expert_units),
    )
    forward = fetch + sum(forward_gather_seconds(step, *part) for part in parts)
    again = 0.0 if step.keeps_gathered else sum(backward_gather_seconds(step, *part) for part in parts)
    backward = fetch + again
    reduced, units = count.updated, (count.units, count.expert_units)
    reduce = reduce_seconds(step, groups.shard_hops, reduced.shared, units[0])
    reduce += reduce_seconds(step, groups.expert_hops, reduced.experts, units[1])
    return (
        forward / (layout.num_microbatches if step.keeps_gathered else 1),
        backward + reduce / (layout.num_microbatches if step.defers_reduction else 1),
    )


def step_traffic(step: TrainingStep, count: StageParameters, groups: ReplicaGroups) -> tuple[float, float]:
    """(reductions of gradients, gathers of parameters) once a step, in seconds.

    Stage 2 has room for the sharded gradients alone, and reduces each microbatch's; those of a part of the model in a looped
    pipeline when a group of microbatches has passed it (`passes_beside`), as Llama 3's training did (arXiv:2407.21783,
    section 3.3.2; arXiv:2211.05953, section 4.2).
    """
    layout, software, count = step.layout, step.software, count.updated

    def once(group: Group, operation: str, size_bytes: float) -> float:
        messages = max(1, math.ceil(size_bytes / _bucket_bytes(step, operation)))
        if software.shards_tensors and operation != "all_reduce":
            messages = max(messages, count.tensors)
        return group.seconds(operation, size_bytes, messages=messages)

    gradients, experts = count.shared * software.reduce_bytes, count.experts * software.reduce_bytes
    if layout.zero_stage == 0:
        return once(groups.all, "all_reduce", gradients) + once(groups.experts, "all_reduce", experts), 0.0
    across = once(groups.replicate, "all_reduce", gradients / groups.shard.size)
    across += once(groups.expert_replicate, "all_reduce", experts / groups.expert_shard.size)
    if layout.zero_stage == 3:
        return across, 0.0
    times = 1
    if layout.zero_stage == 2 and not step.defers_reduction:
        group = passes_beside(layout.schedule, layout.chunks, layout.pipeline, layout.num_microbatches)
        times = math.ceil(layout.num_microbatches / group)
    reduce = times * once(groups.shard, "reduce_scatter", gradients) + across
    reduce += once(groups.expert_shard, "reduce_scatter", experts)
    parameters = once(groups.shard, "all_gather", count.shared * updated_bytes(software))
    return reduce, parameters + once(
        groups.expert_shard, "all_gather", count.experts * updated_bytes(software)
    )


def _bucket_bytes(step: TrainingStep, operation: str) -> float:
    """Of gradients, or of updated parameters, which are gathered by the same buckets."""
    software = step.software
    if software.bucket_elements is None:
        return software.bucket_bytes
    if not software.overlap_reduce:
        return math.inf
    elements = max(software.bucket_elements, software.bucket_elements_of_replica * step.layout.data)
    return elements * (updated_bytes(software) if operation == "all_gather" else software.reduce_bytes)


def optimizer_seconds(
    step: TrainingStep, count: StageParameters, device: Device, host_bytes_per_s: float | None
) -> float:
    """Every byte of the optimizer's state is read and written, gradients are read (twice, for their norm), parameters
    written; code that is not fused goes over them more often.

    State on the host: gradients go there, parameters come back, and the host limits the update.
    """
    layout, software = step.layout, step.software
    states = state_bytes(software)
    parameter, gradient, optimizer = (
        size.of(count.updated, layout, is_sharded=layout.zero_stage > 0)
        for size in (states.parameter, states.gradient, states.optimizer)
    )
    moved = 2.0 * optimizer + 2.0 * gradient + parameter
    if layout.offload_optimizer and host_bytes_per_s is not None:
        rate = software.host_update_bytes_per_s if layout.num_ranks > 1 else _LONE_HOST_UPDATE_BYTES_PER_S
        return (gradient + parameter) / host_bytes_per_s + moved / rate
    return stream_seconds(device, moved * software.update_passes)


# What a server's memory keeps up for one of eight ranks: less than a rank alone has, which other work of the host takes up.
_LONE_HOST_UPDATE_BYTES_PER_S = 25e9


def exposed_step_seconds(
    step: TrainingStep,
    reduce_s: float,
    gather_s: float,
    last_backward_s: float,
    first_forward_s: float,
    known: Coefficients,
) -> float:
    """What reductions add to the last backwards, and gathers of updated parameters to the first forwards. The seconds
    given of both are one microbatch's through all that the device holds."""
    software, layout = step.software, step.layout
    passes = passes_beside(layout.schedule, layout.chunks, layout.pipeline, layout.num_microbatches)

    def exposed(collective_s: float, pass_s: float) -> float:
        bare_s = bare_seconds(collective_s, pass_s, layout.chunks if passes > 1 else 1, passes)
        return bare_s + known.overlap_slowdown * (collective_s - bare_s)

    reduced_s = exposed(reduce_s, last_backward_s) if software.overlap_reduce else reduce_s
    return reduced_s + (exposed(gather_s, first_forward_s) if software.overlap_gather else gather_s)


def bare_seconds(collective_s: float, pass_s: float, chunks: int, passes: int) -> float:
    """Seconds of collectives with no computation beside them: of `chunks` parts alike, each has beside it its own
    microbatch's pass, for its buckets go as they are ready, and all passes of the parts that come after it."""
    own_s = pass_s / chunks
    others_s = (chunks - 1) * passes * own_s
    return max(0.0, collective_s / chunks - own_s, collective_s - own_s - others_s)
