"""Plays a graph of work against durations: when each piece ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.graph import PipelineGraph
from memadvisor.cost.pipelines.work import Kind

Floats = npt.NDArray[np.float64]


def durations_of(graph: PipelineGraph, costs: Sequence[ChunkCosts]) -> Floats:
    """Seconds of each piece, in the graph's order of playing; of two that run as one, all with the second."""
    table = np.array([cost.seconds(kind) for kind in Kind for cost in costs])
    durations: Floats = table[graph.cost]
    first, second = graph.together
    durations[second] += durations[first]
    durations[first] = 0.0
    return durations


def gaps(graph: PipelineGraph, links: Sequence[float], blocking: bool) -> tuple[Floats, Floats]:
    """For each piece how long its input travels, and how long its device cannot compute before it."""
    link_times = np.array([0.0, *links])
    arriving: Floats = link_times[graph.link_in]
    if not blocking:
        return arriving, np.zeros(len(arriving))
    # Between two pieces a device sends the one's result and receives the other's input, at the same time.
    between: Floats = np.maximum(arriving, link_times[graph.link_before])
    between[graph.together[1]] = 0.0
    return arriving, between


def play(graph: PipelineGraph, durations: Floats, links: Sequence[float], blocking: bool) -> Floats:
    """When each piece ends, in the graph's order of playing."""
    arriving, between = gaps(graph, links, blocking)
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


def spans(graph: PipelineGraph, durations: Floats, ends: Floats) -> tuple[tuple[float, ...], float]:
    """Of each device from its first piece's start to its last one's end; and of all together."""
    first, last = graph.by_device[graph.offsets[:-1]], graph.by_device[graph.offsets[1:] - 1]
    starts = ends[first] - durations[first]
    return tuple((ends[last] - starts).tolist()), float(ends[last].max() - starts.min())


def peaks(graph: PipelineGraph, costs: Sequence[ChunkCosts]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most bytes held, and most microbatches begun and not ended: a device's order says both, whatever the times."""
    cost = graph.cost[graph.by_device]
    begins = graph.offsets[:-1]
    bytes_by_kind = np.array([chunk.held_bytes(kind) for kind in Kind for chunk in costs], dtype=np.int64)
    # Each device ends with nothing, so one running sum serves them all.
    held = np.maximum.reduceat(np.cumsum(bytes_by_kind[cost]), begins)
    count_by_kind = np.repeat(np.array([1, -1, 0, -1]), len(costs))
    in_flight = np.maximum.reduceat(np.cumsum(count_by_kind[cost]), begins)
    return tuple(held.tolist()), tuple(in_flight.tolist())
