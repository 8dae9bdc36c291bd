"""Layers dealt out to pipeline stages by modelled costs of each (stage_split.py), in place of equal numbers of them.

The embedding, each layer and the head are the units of the chain; what each costs is what `estimate_step` prices, so an
embedding or a head may have a stage of its own, and a stage that must hold many microbatches gets fewer layers.
"""

from __future__ import annotations

from dataclasses import replace

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.chance import room_bytes, safe_peak_bytes
from memadvisor.cost.layouts.chunks import price_chunks
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.data_parallel import replica_groups
from memadvisor.cost.layouts.estimate import SAFE_P_OOM, StepEstimate, estimate_step
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import layer_groups
from memadvisor.cost.layouts.links import Group, group_of
from memadvisor.cost.layouts.memory import device_contents, stage_memory
from memadvisor.cost.layouts.rank_memory import StageMemory
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import TrainingStep
from memadvisor.planning.stage_split import StageLimit, UnitCost, split_stages


def with_balanced_stages(
    model: Architecture, step: TrainingStep, cluster: Cluster, coefficients: Coefficients = FITTED
) -> TrainingStep:
    """The step with the layers of each stage chosen. Raises UsageError where devices hold several parts of the model, or
    where no split is likely enough to fit.
    """
    layout = step.layout
    estimate = estimate_step(model, step, cluster, coefficients)
    if any(len(chunks) > 1 for chunks in estimate.pipeline.chunks):
        raise UsageError(
            f"{layout.schedule} with {layout.chunks} chunks gives devices several parts of the model, and stages are"
            " balanced for one part each.",
            hint="use --chunks 1 and 1f1b or gpipe, or leave --split out.",
        )
    if layout.pipeline == 1:
        return step
    units = _units(model, step, cluster, coefficients)
    safe_bytes = _safe_bytes(estimate, coefficients)
    limits = []
    for stage, in_flight in enumerate(estimate.pipeline.peak_in_flight):
        memory = _fixed(model, step, stage, coefficients)
        room = (safe_bytes - coefficients.allocator_fixed_bytes) / coefficients.allocator_share
        limits.append(
            StageLimit(
                memory_bytes=room - memory.head_bytes - memory.buffer_bytes, num_in_flight=max(1, in_flight)
            )
        )
    found = split_stages(units, limits, layout.num_microbatches)
    if found is None:
        raise UsageError(
            f"no split of {model.n_layers} layers and both ends into {layout.pipeline} stages is likely to fit.",
            hint="use recomputation, a higher ZeRO stage or more stages.",
        )
    first, *between, last = found.num_units
    layers = (first - 1, *between, last - 1)
    return replace(step, layout=replace(layout, stage_layers=layers))


def _units(
    model: Architecture, step: TrainingStep, cluster: Cluster, coefficients: Coefficients
) -> list[UnitCost]:
    """Chunks of one layer between two that have an end of the model alone. All messages of the chain are of one size, and
    do not tell splits apart."""
    layout, software = step.layout, step.software
    device = device_of(cluster.accelerator, software.compute_dtype, coefficients)

    def group(size: int, stride: int) -> Group:
        return group_of(cluster, size, stride, coefficients)

    host_bytes_per_s = None if cluster.host is None else cluster.host.bytes_per_s
    groups = layer_groups(layout, group, layout.pipeline > 1 and cluster.num_nodes > 1)
    chain = (0, *(1,) * model.n_layers, 0)
    chunks = price_chunks(model, step, chain, device, groups, replica_groups(layout, group, host_bytes_per_s))
    units = []
    for place, chunk in enumerate(chunks):
        held = stage_memory(model, step, device_contents((place,), chain), 0.0, coefficients)
        units.append(
            UnitCost(
                name=f"part {place}",
                forward_s=chunk.costs.forward_s,
                backward_s=chunk.costs.input_backward_s + chunk.costs.weight_backward_s,
                state_bytes=held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes,
                saved_bytes=chunk.costs.activation_bytes * (1.0 - layout.offload_activations),
            )
        )
    return units


def _fixed(model: Architecture, step: TrainingStep, stage: int, coefficients: Coefficients) -> StageMemory:
    """Of a stage with one layer: what it holds beside states and saved activations grows no further."""
    chain = (1,) * step.layout.pipeline
    return stage_memory(model, step, device_contents((stage,), chain), 0.0, coefficients)


def _safe_bytes(estimate: StepEstimate, coefficients: Coefficients) -> float:
    """The largest peak whose chance of running out of memory is accepted, with the worst stage's states."""
    left_bytes = room_bytes(estimate.worst, estimate.memory_bytes, coefficients)
    return safe_peak_bytes(estimate.worst.states_bytes, left_bytes, SAFE_P_OOM, coefficients)
