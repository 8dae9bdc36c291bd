"""Time of one training step of a captured model in any layout of data parallelism, ZeRO and pipeline stages.

The same functions as for a described model price what a run of one rank has not seen: links and collectives (links.py),
traffic of ZeRO stages and what computation hides of it (data_parallel.py), and the pipeline (../pipelines/). In place of
formulas of layers stand the units' own seconds (captured_times.py). Everything that comes out is predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from memadvisor.cost.captured_units import CapturedModel, CapturedUnit
from memadvisor.cost.layouts.captured_times import Target
from memadvisor.cost.layouts.data_parallel import (
    ReplicaGroups,
    exposed_step_seconds,
    hidden_seconds,
    microbatch_traffic,
    replica_groups,
    step_traffic,
)
from memadvisor.cost.layouts.links import message_seconds
from memadvisor.cost.layouts.memory import StageParameters
from memadvisor.cost.pipelines.costs import ChunkCosts, PipelineTimes
from memadvisor.cost.pipelines.simulate import simulate_pipeline
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_traits import Software


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLayout:
    """`layout.recompute` is `full` where units are recomputed, each as a whole: those of `recomputed`. `stage_units`: how many
    units of the chain each pipeline stage has.
    """

    layout: Layout
    recomputed: frozenset[str]
    stage_units: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTimes:
    """`time_s` sums to `step_time_s`: of the busiest device, and what it waits for."""

    step_time_s: float
    time_s: Mapping[str, float]
    pipeline: PipelineTimes


def software_of(model: CapturedModel) -> Software:
    """What the run shows of its code: gradients are as the parameters, and reduced unit by unit."""
    size = model.parameter_bytes
    optimizer = sum(unit.optimizer_bytes for unit in model.units)
    with_parameters = sum(1 for unit in model.units if unit.elements)
    return Software(
        name="captured",
        compute_dtype=model.dtype or "float32",
        parameter_bytes=size,
        gradient_bytes=size,
        reduce_bytes=size,
        optimizer_bytes=round(optimizer / max(1, model.elements)),
        bucket_bytes=max(1.0, model.elements * size / max(1, with_parameters)),
    )


def stage_parameters_of(units: Collection[CapturedUnit]) -> StageParameters:
    return StageParameters(
        shared=float(sum(unit.elements for unit in units)),
        experts=0.0,
        widest_layer=float(max((unit.elements for unit in units), default=0)),
    )


def stages_of(model: CapturedModel, stage_units: tuple[int, ...]) -> list[tuple[CapturedUnit, ...]]:
    ends = accumulate(stage_units, initial=0)
    return [model.units[start:end] for start, end in pairwise(ends)]


def captured_times(model: CapturedModel, chosen: CapturedLayout, target: Target) -> CapturedTimes:
    """Raises UsageError where a link that the layout crosses is not known, or the schedule cannot run."""
    layout = chosen.layout
    step = TrainingStep(layout=layout, seq_len=1, software=software_of(model))
    host = target.cluster.host
    groups = replica_groups(layout, target.group, None if host is None else host.bytes_per_s)
    share = layout.micro_batch_size / model.micro_batch_size
    stages = stages_of(model, chosen.stage_units)
    works = [_Work.of(units, chosen.recomputed, share, target) for units in stages]
    counts = [stage_parameters_of(units) for units in stages]
    costs = [_chunk(step, units, work, groups, target) for units, work in zip(stages, works, strict=True)]
    pipeline = simulate_pipeline(
        layout.schedule,
        costs,
        layout.num_microbatches,
        num_devices=layout.pipeline,
        transfer_s=_messages(stages, share, layout, target),
    )
    known = target.coefficients
    exposed = optimizer = 0.0
    for cost, count in zip(costs, counts, strict=True):
        reduce_s, gather_s = step_traffic(step, count, groups)
        forward_s, backward_s = cost.forward_s, cost.input_backward_s
        exposed = max(exposed, exposed_step_seconds(step, reduce_s, gather_s, backward_s, forward_s, known))
        owned = count.sharded(layout) if layout.zero_stage else count.all
        optimizer = max(optimizer, model.optimizer_s * owned / max(1, model.elements))
    optimizer = target.stream_seconds(optimizer)
    busiest = max(range(len(works)), key=lambda place: pipeline.busy_s[place])
    work, passes = works[busiest], layout.num_microbatches
    samples = layout.micro_batch_size * passes
    time_s = {
        "units": passes * (work.forward_s + work.backward_s),
        "recompute": passes * work.recompute_s,
        "sharded_parameters": max(0.0, pipeline.busy_s[busiest] - passes * work.all_s),
        "pipeline_bubble": max(0.0, pipeline.step_s - pipeline.busy_s[busiest]),
        "gradients_and_parameters": exposed,
        "optimizer": optimizer,
        "outside": model.outside_s * samples / model.rank_samples,
    }
    return CapturedTimes(step_time_s=sum(time_s.values()), time_s=time_s, pipeline=pipeline)


@dataclass(frozen=True, slots=True)
class _Work:
    """A stage's seconds of one micro-batch."""

    forward_s: float
    backward_s: float
    recompute_s: float

    @property
    def all_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s

    @classmethod
    def of(
        cls, units: Collection[CapturedUnit], recomputed: frozenset[str], share: float, target: Target
    ) -> _Work:
        forward = backward = again = 0.0
        for unit in units:
            forward_s = target.pass_seconds(unit.forward, share)
            forward += forward_s
            backward += target.pass_seconds(unit.backward, share)
            if unit.name in recomputed:
                again += forward_s * (
                    unit.recompute_s / unit.forward.seconds if unit.forward.seconds else 1.0
                )
        return cls(forward, backward, again)


def _chunk(
    step: TrainingStep,
    units: Collection[CapturedUnit],
    work: _Work,
    groups: ReplicaGroups,
    target: Target,
) -> ChunkCosts:
    """Sharded parameters are gathered, and their gradients reduced, unit by unit."""
    slowdown = target.coefficients.overlap_slowdown
    traffic = [microbatch_traffic(step, stage_parameters_of([unit]), groups) for unit in units]
    gather_s, backward_traffic_s = (sum(seconds) for seconds in zip(*traffic, strict=True))
    return ChunkCosts(
        forward_s=hidden_seconds(work.forward_s, gather_s, slowdown),
        input_backward_s=hidden_seconds(work.backward_s + work.recompute_s, backward_traffic_s, slowdown),
        weight_backward_s=0.0,
    )


def _messages(
    stages: list[tuple[CapturedUnit, ...]], share: float, layout: Layout, target: Target
) -> list[float]:
    """Between neighbouring stages, and last the way back, which no schedule here uses."""
    if layout.pipeline == 1:
        return [0.0]
    seconds = []
    for stage, units in enumerate(stages[:-1]):
        size_bytes = (units[-1].cut_bytes or 0) * share
        links = message_seconds(target.cluster, size_bytes, layout.pipeline, layout.data, target.coefficients)
        seconds.append(links[stage])
    return [*seconds, max(seconds)]
