"""BPipe (Kim et al., ICML 2023): 1F1B whose first devices keep part of their activations on the last ones.

Device d is paired with device p-1-d. With K = ceil((p+2)/2), a device that would hold more than K microbatches keeps
the K-1 whose backward comes next. Others leave as soon as their forward has ended, and come back one by one as
backwards make room; a forward begins when the one before has left. So no device holds more than K, and the one that
keeps the others' no more either unless a move takes longer than a forward: then there are two on their way, one in
each direction, and K+1. The two directions run beside the compute, one microbatch at a time each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.graph import PipelineGraph
from memadvisor.cost.pipelines.play import Floats, gaps
from memadvisor.cost.pipelines.work import Kind


@dataclass(slots=True)
class Moves:
    """A device's moves by microbatch (those from `first` on leave), and when each of its pieces ran."""

    first: int  # num_microbatches where none leaves
    leaves: dict[int, tuple[float, float]] = field(default_factory=dict)
    returns: dict[int, tuple[float, float]] = field(default_factory=dict)
    forward: dict[int, tuple[float, float]] = field(default_factory=dict)
    backward: dict[int, tuple[float, float]] = field(default_factory=dict)

    def start(self, kind: Kind, microbatch: int, move_s: float) -> float:
        """Before when a piece may not begin; a backward has its microbatch fetched for it."""
        if kind is Kind.F:
            return self.leaves.get(microbatch - 1, (0.0, 0.0))[1]
        if microbatch < self.first:
            return 0.0
        room = self.backward[microbatch - self.first][1]
        before = self.returns.get(microbatch - 1, (0.0, 0.0))[1]
        begin = max(self.leaves[microbatch][1], before, room)
        self.returns[microbatch] = (begin, begin + move_s)
        return begin + move_s

    def ran(self, kind: Kind, microbatch: int, start: float, end: float, move_s: float) -> None:
        if kind is not Kind.F:
            self.backward[microbatch] = (start, end)
            return
        self.forward[microbatch] = (start, end)
        if microbatch >= self.first:
            begin = max(end, self.leaves.get(microbatch - 1, (0.0, 0.0))[1])
            self.leaves[microbatch] = (begin, begin + move_s)


def most_held(num_devices: int) -> int:
    """K, the microbatches of a stage that a device holds at most."""
    return (num_devices + 3) // 2


def play_balanced(
    graph: PipelineGraph, durations: Floats, links: Sequence[float], blocking: bool, move_s: float
) -> tuple[Floats, list[Moves]]:
    """When each piece of 1F1B ends if moving a microbatch's activations to the other device takes `move_s`."""
    count, total = graph.order.num_devices, graph.order.num_microbatches
    kept = most_held(count)
    moves = [Moves(first=kept - 1 if min(count - device, total) > kept else total) for device in range(count)]
    arriving, between = gaps(graph, links, blocking)
    clocks = [0.0] * count
    ends = [0.0]
    kinds = (graph.cost // graph.order.num_chunks).tolist()
    columns = (graph.device, graph.needs, graph.microbatch, between, arriving, durations)
    for kind, device, needed, microbatch, gap, lag, duration in zip(
        kinds, *(column.tolist() for column in columns), strict=True
    ):
        work = Kind(kind)
        start = max(clocks[device] + gap, ends[needed] + lag, moves[device].start(work, microbatch, move_s))
        clocks[device] = start + duration
        ends.append(start + duration)
        moves[device].ran(work, microbatch, start, start + duration, move_s)
    return np.array(ends[1:]), moves


def balanced_peaks(
    moves: Sequence[Moves], costs: Sequence[ChunkCosts]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most bytes, and most microbatches, that each device holds, its own and those that it keeps for the other."""
    changes: list[list[tuple[float, int, int]]] = [[] for _ in moves]
    for device, moved in enumerate(moves):
        size_bytes = costs[device].activation_bytes
        keeper = changes[len(moves) - 1 - device]
        for microbatch, (begin, _) in moved.forward.items():
            changes[device].append((begin, 1, size_bytes))
            changes[device].append((moved.backward[microbatch][1], -1, -size_bytes))
        for microbatch, (left, gone) in moved.leaves.items():
            came, back = moved.returns[microbatch]
            changes[device] += [(gone, -1, -size_bytes), (came, 1, size_bytes)]
            keeper += [(left, 1, size_bytes), (back, -1, -size_bytes)]
    held_bytes, held = [], []
    for device_changes in changes:
        # What goes at a moment makes room for what comes then.
        ordered = sorted(device_changes)
        held.append(max(np.cumsum([count for _, count, _ in ordered]).tolist()))
        held_bytes.append(max(np.cumsum([size for _, _, size in ordered]).tolist()))
    return tuple(held_bytes), tuple(held)
