"""Plays a pipeline's order of work: when each piece runs, what a step takes, what each device holds.

A piece starts when the piece before it on its device has ended and its input is there. Its input is there the
transfer's time after its producer's end. Either only the receiver waits for transfers (they run beside the compute),
or, `blocking`, a device computes nothing while it sends or receives, both at the same time where it does both, as
Megatron-LM's batched exchanges between two pieces do. Transfers do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memadvisor.cost.pipelines.costs import ChunkCosts, PipelineTimes, Played, check_costs, link_seconds
from memadvisor.cost.pipelines.graph import PipelineGraph
from memadvisor.cost.pipelines.schedules import canonical_name, graph_of
from memadvisor.cost.pipelines.steady import steady_step_s
from memadvisor.cost.pipelines.work import Ending, Kind
from memadvisor.errors import UsageError

Floats = npt.NDArray[np.float64]


def simulate_pipeline(
    schedule: str,
    costs: Sequence[ChunkCosts],
    num_microbatches: int,
    *,
    num_devices: int,
    transfer_s: float | Sequence[float] = 0.0,
    blocking: bool = False,
    timeline: bool = False,
) -> PipelineTimes:
    """One training step of a pipeline of `num_devices`.

    `costs` has one entry for each chunk of the model, in the model's order; the schedule places them (two pipelines
    in opposite directions run the same chunks). `transfer_s` between neighbours is one number or one for each link
    (`link_seconds`), the same for activations and their gradients. Raises UsageError for what cannot run.
    """
    if num_devices < 1 or len(costs) % num_devices:
        raise UsageError(
            f"{len(costs)} chunks of a model cannot be dealt evenly to {num_devices} devices of a pipeline.",
            hint="give the costs of as many chunks as a multiple of the devices.",
        )
    check_costs(costs)
    links = link_seconds(transfer_s, num_devices)
    graph = graph_of(schedule, num_devices, num_microbatches, len(costs) // num_devices)
    durations = np.array([cost.seconds(kind) for kind in Kind for cost in costs])[graph.cost]
    ends = _play(graph, durations, links, blocking)
    spans, makespan_s = _spans(graph, durations, ends)
    busy = np.bincount(graph.device, weights=durations, minlength=num_devices)
    if graph.order.ending is Ending.FLUSH:
        step_s = makespan_s
    elif graph.order.ending is Ending.POST_VALIDATED:
        # Shifted by the longest stretch, the next step fits behind this one on every device: no shorter one does.
        step_s = max(spans)
    else:
        step_s = num_microbatches * steady_step_s(costs, links, blocking)
    held_bytes, in_flight = _peaks(graph, costs)
    return PipelineTimes(
        schedule=canonical_name(schedule),
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        makespan_s=makespan_s,
        step_s=step_s,
        ending=graph.order.ending,
        busy_s=tuple(busy.tolist()),
        span_s=spans,
        peak_held_bytes=held_bytes,
        peak_in_flight=in_flight,
        chunks=graph.chunks,
        weight_copies=graph.order.weight_copies,
        weight_versions=graph.order.weight_versions,
        timeline=_timeline(graph, durations, ends) if timeline else None,
    )


def _play(graph: PipelineGraph, durations: Floats, links: Sequence[float], blocking: bool) -> Floats:
    """When each piece ends, in the graph's order of playing."""
    link_times = np.array([0.0, *links])
    arriving = link_times[graph.link_in]
    # What a device does between two pieces when it does not compute meanwhile: send the one's result, receive the
    # other's input.
    between = np.maximum(arriving, link_times[graph.link_before]) if blocking else np.zeros(len(durations))
    clocks = [0.0] * graph.order.num_devices
    ends = [0.0]
    for device, needed, gap, lag, duration in zip(
        graph.device.tolist(),
        graph.needs.tolist(),
        between.tolist(),
        arriving.tolist(),
        durations.tolist(),
        strict=True,
    ):
        start = clocks[device] + gap
        there = ends[needed] + lag
        if there > start:
            start = there
        clocks[device] = end = start + duration
        ends.append(end)
    return np.array(ends[1:])


def _spans(graph: PipelineGraph, durations: Floats, ends: Floats) -> tuple[tuple[float, ...], float]:
    """Of each device from its first piece's start to its last one's end; and of all together."""
    first, last = graph.by_device[graph.offsets[:-1]], graph.by_device[graph.offsets[1:] - 1]
    starts = ends[first] - durations[first]
    return tuple((ends[last] - starts).tolist()), float(ends[last].max() - starts.min())


def _peaks(graph: PipelineGraph, costs: Sequence[ChunkCosts]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most bytes held, and most microbatches begun and not ended: a device's order says both, whatever the times."""
    cost = graph.cost[graph.by_device]
    begins = graph.offsets[:-1]
    bytes_by_kind = np.array([chunk.held_bytes(kind) for kind in Kind for chunk in costs], dtype=np.int64)
    # Each device ends with nothing, so one running sum serves them all.
    held = np.maximum.reduceat(np.cumsum(bytes_by_kind[cost]), begins)
    count_by_kind = np.repeat(np.array([1, -1, 0, -1]), len(costs))
    in_flight = np.maximum.reduceat(np.cumsum(count_by_kind[cost]), begins)
    return tuple(held.tolist()), tuple(in_flight.tolist())


def _timeline(graph: PipelineGraph, durations: Floats, ends: Floats) -> tuple[Played, ...]:
    """Every piece, device by device in its order."""
    rows = graph.by_device
    kinds, chunks = np.divmod(graph.cost[rows], graph.order.num_chunks)
    return tuple(
        Played(device, Kind(kind), chunk, microbatch, start_s, end_s)
        for device, kind, chunk, microbatch, start_s, end_s in zip(
            graph.device[rows].tolist(),
            kinds.tolist(),
            chunks.tolist(),
            graph.microbatch[rows].tolist(),
            (ends[rows] - durations[rows]).tolist(),
            ends[rows].tolist(),
            strict=True,
        )
    )
