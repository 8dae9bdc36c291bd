"""A long step of a pipeline from a short one: what lies between filling and emptying repeats itself.

1F1B and its interleaved form do the same with every further microbatch (with every further p of them), so their times are
a linear system in (max, +), whose states repeat after a while: ends of microbatch j + c are those of j plus a constant
(Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992, section 3.7). A short step is played, and its
ends are looked at: once they repeat over a stretch that holds all that later pieces wait for, every later piece repeats
too, and so does the emptying. Where they do not, a longer step is played, the whole one in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.graph import PipelineGraph
from memadvisor.cost.pipelines.play import Floats, durations_of, peaks, play
from memadvisor.cost.pipelines.schedules import graph_of
from memadvisor.cost.pipelines.work import Kind

# How many groups of p microbatches a piece and what it waits for lie apart at most.
REACH = {"1f1b": 1, "interleaved": 2}
# Groups that a step has beyond those that must be in it to be looked at.
_SETTLING = 1
# Constants that differ by less than this share are one.
_SAME = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """`num_left_out` microbatches, which take `left_out_s`, were not played: all that is behind them is as much later."""

    graph: PipelineGraph
    durations: Floats
    ends: Floats
    held_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    num_left_out: int = 0
    left_out_s: float = 0.0


def play_whole(
    graph: PipelineGraph, costs: Sequence[ChunkCosts], links: Sequence[float], blocking: bool
) -> PlayedStep:
    durations = durations_of(graph, costs)
    ends = play(graph, durations, links, blocking)
    held_bytes, in_flight = peaks(graph, costs)
    return PlayedStep(graph=graph, durations=durations, ends=ends, held_bytes=held_bytes, in_flight=in_flight)


def play_repeating(
    name: str, costs: Sequence[ChunkCosts], links: Sequence[float], num_microbatches: int, blocking: bool
) -> PlayedStep:
    """Of a schedule in `REACH`. What devices hold at most, they hold before anything repeats."""
    num_devices = len(links)
    chunks = len(costs) // num_devices
    reach = num_devices * REACH[name]
    # With one chunk a device a microbatch does what the one before did, with several what the p-th before did.
    unit = 1 if chunks == 1 else num_devices
    number = 3 * reach + (1 + _SETTLING) * num_devices
    number += (num_microbatches - number) % unit
    while number + unit <= num_microbatches:
        played = play_whole(graph_of(name, num_devices, number, chunks), costs, links, blocking)
        found = _repetition(played, reach, unit)
        if found is None:
            number *= 2
            continue
        period, period_s = found
        times, over = divmod(num_microbatches - number, period)
        if over == 0:
            return replace(played, num_left_out=times * period, left_out_s=times * period_s)
        number += over
    return play_whole(graph_of(name, num_devices, num_microbatches, chunks), costs, links, blocking)


def _repetition(played: PlayedStep, reach: int, unit: int) -> tuple[int, float] | None:
    """(microbatches, seconds) after which all ends repeat before the step empties; None where they do not."""
    graph, order = played.graph, played.graph.order
    by_microbatch = np.empty((2 * order.num_chunks, order.num_microbatches))
    forward = graph.cost < order.num_chunks
    rows = np.where(forward, graph.cost, graph.cost - (Kind.BW - 1) * order.num_chunks)
    by_microbatch[rows, graph.microbatch] = played.ends
    end = order.num_microbatches - reach
    for period in range(unit, end - 2 * reach + 1, unit):
        later = slice(end - reach, end)
        before = slice(end - reach - period, end - period)
        first = by_microbatch[0, later] - by_microbatch[0, before]
        seconds = float(first[0])
        if np.ptp(first) > _SAME * seconds:
            continue
        all_of_them = by_microbatch[:, later] - by_microbatch[:, before]
        if np.ptp(all_of_them) <= _SAME * seconds:
            return period, float(all_of_them.mean())
    return None
