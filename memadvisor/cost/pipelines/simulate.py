"""Plays a pipeline's order of work: when each piece runs, what a step takes, what each device holds.

A piece starts when the piece before it on its device has ended and its input is there. Its input is there the
transfer's time after its producer's end. Either only the receiver waits for transfers (they run beside the compute),
or, `blocking`, a device computes nothing while it sends or receives, both at the same time where it does both, as
Megatron-LM's batched exchanges between two pieces do. Transfers do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from memadvisor.cost.pipelines.automatic import AUTOMATIC, automatic_graph
from memadvisor.cost.pipelines.balanced import balanced_peaks, play_balanced
from memadvisor.cost.pipelines.costs import ChunkCosts, PipelineTimes, Played, check_costs, link_seconds
from memadvisor.cost.pipelines.graph import PipelineGraph
from memadvisor.cost.pipelines.play import Floats, durations_of, spans
from memadvisor.cost.pipelines.repeating import REACH, PlayedStep, play_repeating, play_whole
from memadvisor.cost.pipelines.schedules import canonical_name, check_schedule, graph_of
from memadvisor.cost.pipelines.steady import steady_step_s
from memadvisor.cost.pipelines.work import Ending, Kind
from memadvisor.errors import UsageError


def simulate_pipeline(
    schedule: str,
    costs: Sequence[ChunkCosts],
    num_microbatches: int,
    *,
    num_devices: int,
    transfer_s: float | Sequence[float] = 0.0,
    blocking: bool = False,
    balance_s: float = 0.0,
    timeline: bool = False,
) -> PipelineTimes:
    """One training step of a pipeline of `num_devices`.

    `costs` has one entry for each chunk of the model, in the model's order; the schedule places them (two pipelines
    in opposite directions run the same chunks). `transfer_s` between neighbours is one number or one for each link
    (`link_seconds`), the same for activations and their gradients. `balance_s` is what BPipe needs to move one
    microbatch's activations to the other device of a pair. Raises UsageError for what cannot run.
    """
    if num_devices < 1 or len(costs) % num_devices:
        raise UsageError(
            f"{len(costs)} chunks of a model cannot be dealt evenly to {num_devices} devices of a pipeline.",
            hint="give the costs of as many chunks as a multiple of the devices.",
        )
    check_costs(costs)
    if not 0 <= balance_s < float("inf"):
        raise UsageError(f"Moving activations between devices of a pipeline cannot take {balance_s} s.")
    links = link_seconds(transfer_s, num_devices)
    name = canonical_name(schedule)
    check_schedule(name, num_devices, num_microbatches, len(costs) // num_devices)
    simulate = _simulate if timeline else _kept
    return simulate(name, tuple(costs), num_microbatches, tuple(links), blocking, balance_s, timeline)


def _simulate(
    name: str,
    costs: tuple[ChunkCosts, ...],
    num_microbatches: int,
    links: tuple[float, ...],
    blocking: bool,
    balance_s: float,
    timeline: bool,
) -> PipelineTimes:
    num_devices = len(links)
    played = _play(name, costs, links, num_microbatches, blocking, balance_s, is_whole=timeline)
    graph, durations, ends = played.graph, played.durations, played.ends
    span_s, makespan_s = spans(graph, durations, ends)
    span_s, makespan_s = tuple(span + played.left_out_s for span in span_s), makespan_s + played.left_out_s
    busy = np.bincount(graph.device, weights=durations, minlength=num_devices)
    if played.num_left_out:
        each = [cost.seconds(Kind.F) + cost.seconds(Kind.BW) for cost in costs]
        of_devices = np.array([sum(each[chunk] for chunk in held) for held in graph.chunks])
        busy = busy + played.num_left_out * of_devices
    if graph.order.ending is Ending.FLUSH:
        step_s = makespan_s
    elif graph.order.ending is Ending.POST_VALIDATED:
        # Shifted by the longest stretch, the next step fits behind this one on every device: no shorter one does.
        step_s = max(span_s)
    else:
        step_s = num_microbatches * steady_step_s(costs, links, blocking)
    return PipelineTimes(
        schedule=name,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        makespan_s=makespan_s,
        step_s=step_s,
        ending=graph.order.ending,
        busy_s=tuple(busy.tolist()),
        span_s=span_s,
        peak_held_bytes=played.held_bytes,
        peak_in_flight=played.in_flight,
        chunks=graph.chunks,
        weight_copies=graph.order.weight_copies,
        weight_versions=graph.order.weight_versions,
        timeline=_timeline(graph, costs, durations, ends) if timeline else None,
    )


# Layouts that differ in where their states are alone play the same pipeline.
_kept = lru_cache(maxsize=64)(_simulate)


def _play(
    name: str,
    costs: Sequence[ChunkCosts],
    links: Sequence[float],
    num_microbatches: int,
    blocking: bool,
    balance_s: float,
    is_whole: bool,
) -> PlayedStep:
    if name in REACH and not is_whole:
        return play_repeating(name, costs, links, num_microbatches, blocking)
    if name in AUTOMATIC:
        graph = automatic_graph(name, tuple(costs), tuple(links), num_microbatches)
    else:
        graph = graph_of(name, len(links), num_microbatches, len(costs) // len(links))
    if name != "bpipe":
        return play_whole(graph, costs, links, blocking)
    durations = durations_of(graph, costs)
    ends, moves = play_balanced(graph, durations, links, blocking, balance_s)
    held_bytes, in_flight = balanced_peaks(moves, costs)
    return PlayedStep(graph=graph, durations=durations, ends=ends, held_bytes=held_bytes, in_flight=in_flight)


def _timeline(
    graph: PipelineGraph, costs: Sequence[ChunkCosts], durations: Floats, ends: Floats
) -> tuple[Played, ...]:
    """Every piece, device by device in its order; of two that run as one, the first in the first part of their time."""
    first, second = graph.together
    begin, finish = ends - durations, ends.copy()
    begin[first] = begin[second]
    finish[first] = begin[second] = begin[first] + [costs[chunk].forward_s for chunk in graph.cost[first]]
    rows = graph.by_device
    kinds, chunks = np.divmod(graph.cost[rows], graph.order.num_chunks)
    return tuple(
        Played(device, Kind(kind), chunk, microbatch, start_s, end_s)
        for device, kind, chunk, microbatch, start_s, end_s in zip(
            graph.device[rows].tolist(),
            kinds.tolist(),
            chunks.tolist(),
            graph.microbatch[rows].tolist(),
            begin[rows].tolist(),
            finish[rows].tolist(),
            strict=True,
        )
    )
