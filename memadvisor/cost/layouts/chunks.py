"""What each part of the model that a pipeline moves through costs: one microbatch's times, bytes and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.data_parallel import ReplicaGroups, hidden_seconds, microbatch_traffic
from memadvisor.cost.layouts.end_work import embedding_work, head_work
from memadvisor.cost.layouts.kernels import Device
from memadvisor.cost.layouts.layer_work import Groups, Work, layer_work
from memadvisor.cost.layouts.memory import StageParameters, device_contents, stage_parameters
from memadvisor.cost.layouts.saved import chunk_saved_bytes, layer_weight_input_bytes
from memadvisor.cost.layouts.vision_work import tower_saved_bytes, tower_work
from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.layout import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedChunk:
    """`work` is of the chunk's layers and ends alone; `costs` has collectives of sharded parameters under it."""

    work: Work
    parameters: StageParameters
    costs: ChunkCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class _PricedLayer:
    """One of the model's kinds of layer."""

    work: Work
    weight_input_bytes: float


def price_chunks(
    model: Architecture,
    step: TrainingStep,
    layers: tuple[int, ...],
    device: Device,
    groups: Groups,
    replica_groups: ReplicaGroups,
) -> list[PricedChunk]:
    """In the model's order; `layers` has the number of layers of each chunk. Chunks that are alike are one object."""
    kinds = {
        kind: _PricedLayer(
            work=layer_work(model, step, layer, device, groups),
            weight_input_bytes=layer_weight_input_bytes(model, step, layer),
        )
        for kind, (_, layer) in model.kinds().items()
    }
    embedding, head = embedding_work(model, step, device, groups), head_work(model, step, device, groups)
    tower = tower_work(model, step, device, groups)
    # Most chunks of a pipeline are alike, and priced once.
    priced: dict[tuple[object, ...], PricedChunk] = {}
    found = []
    start, last = 0, len(layers) - 1
    for chunk, number in enumerate(layers):
        among = model.kinds_among(range(start, start + number))
        start += number
        numbers = tuple(among.get(kind, (0, 0))[0] for kind in kinds)
        alike = (numbers, chunk == 0, chunk == last)
        if alike not in priced:
            held = device_contents((chunk,), layers)
            counted = list(zip(numbers, kinds.values(), strict=True))
            work = sum_of(
                [(times, kind.work) for times, kind in counted]
                + [(held.embeddings, embedding), (held.embeddings, tower), (held.heads, head)]
            )
            saved = chunk_saved_bytes(model, step, held.layers)
            saved += held.embeddings * tower_saved_bytes(model, step)
            work = _with_transfers(step, work, saved, replica_groups.host_bytes_per_s)
            inputs = sum(times * kind.weight_input_bytes for times, kind in counted)
            count = stage_parameters(model, step, held)
            costs = _chunk_costs(step, work, count, saved, inputs, replica_groups, device.coefficients)
            priced[alike] = PricedChunk(work=work, parameters=count, costs=costs)
        found.append(priced[alike])
    return found


def _with_transfers(
    step: TrainingStep, work: Work, saved_bytes: float, host_bytes_per_s: float | None
) -> Work:
    """The same where the device waits for activations: the forward is no faster than they leave for the host, nor the backward
    than they come back. Nothing where the link is not known, nor beside pointwise recomputation: which of what it keeps JAX moves
    (MaxText's minimal_offloaded) is another matter."""
    share = step.layout.offload_activations
    if not share or host_bytes_per_s is None or step.layout.recompute == "pointwise":
        return work
    moved_s = share * saved_bytes / host_bytes_per_s
    forward_s, backward_s = max(work.forward_s, moved_s), max(work.backward_s, moved_s)
    idle_s = forward_s - work.forward_s + backward_s - work.backward_s
    return replace(work, forward_s=forward_s, backward_s=backward_s, host_s=work.host_s + idle_s)


def _chunk_costs(
    step: TrainingStep,
    work: Work,
    count: StageParameters,
    saved_bytes: float,
    weight_input_bytes: float,
    groups: ReplicaGroups,
    known: Coefficients,
) -> ChunkCosts:
    gather_s, backward_traffic_s = microbatch_traffic(step, count, groups)
    backward_s = hidden_seconds(work.backward_s, backward_traffic_s, known.overlap_slowdown)
    return ChunkCosts(
        forward_s=hidden_seconds(work.forward_s, gather_s, known.overlap_slowdown),
        input_backward_s=backward_s - work.weight_s,
        weight_backward_s=work.weight_s,
        activation_bytes=round(saved_bytes),
        weight_activation_bytes=round(min(saved_bytes, weight_input_bytes)),
    )


_FIELDS = tuple(field.name for field in fields(Work))


def sum_of(parts: Sequence[tuple[float, Work]]) -> Work:
    """So many times each, field by field."""
    return Work(**{name: sum(times * getattr(work, name) for times, work in parts) for name in _FIELDS})
