"""ZB-1p and ZB-2p: the best split order found for real times under once or twice the memory of 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.graph import PipelineGraph, pipeline_graph
from memadvisor.cost.pipelines.greedy import UNKNOWN, Choices, Greedy
from memadvisor.cost.pipelines.play import durations_of, peaks, play, spans
from memadvisor.cost.pipelines.work import Ending, PipelineOrder
from memadvisor.cost.pipelines.zero_bubble import zb_h1, zb_h2

AUTOMATIC = {"zb-1p": 1, "zb-2p": 2}


@lru_cache(maxsize=64)
def automatic_graph(
    name: str, costs: tuple[ChunkCosts, ...], links: tuple[float, ...], num_microbatches: int
) -> PipelineGraph:
    """The order of the shortest step among the greedy ones (`Greedy`) and those drawn by hand that fit.

    The limit of every device is pM or 2pM (arXiv:2401.10241, section 4), M the largest chunk's bytes. Where no bytes are
    given, W is taken to hold what B holds, one for each microbatch.
    """
    if not any(cost.activation_bytes for cost in costs):
        costs = tuple(replace(cost, activation_bytes=1, weight_activation_bytes=1) for cost in costs)
    in_flight = min(len(costs), num_microbatches)
    limit_bytes = AUTOMATIC[name] * in_flight * max(cost.activation_bytes for cost in costs)
    shortest = _Shortest(costs, links, limit_bytes)
    for drawn in (zb_h1, zb_h2):
        shortest.look_at(_graph_by_hand(drawn, len(costs), num_microbatches))
    for greedy in _greedy_ones(costs, links, num_microbatches, limit_bytes):
        codes = greedy.run(shortest.step_s)
        if codes is not None:
            shortest.look_at(pipeline_graph(_order(codes, num_microbatches), greedy.sequence))
    assert shortest.graph is not None, "ZB-H1 needs no more memory than 1F1B"
    return shortest.graph


class _Shortest:
    """The order of the shortest step of those looked at: the first of several."""

    def __init__(self, costs: Sequence[ChunkCosts], links: Sequence[float], limit_bytes: int) -> None:
        self.costs, self.links, self.limit_bytes = costs, links, limit_bytes
        self.graph: PipelineGraph | None = None
        self.step_s = UNKNOWN

    def look_at(self, graph: PipelineGraph) -> None:
        if max(peaks(graph, self.costs)[0]) > self.limit_bytes:
            return
        durations = durations_of(graph, self.costs)
        ends = play(graph, durations, self.links, blocking=False)
        step_s = max(spans(graph, durations, ends)[0])
        if step_s < self.step_s:
            self.graph, self.step_s = graph, step_s


def _greedy_ones(
    costs: tuple[ChunkCosts, ...], links: tuple[float, ...], num_microbatches: int, limit_bytes: int
) -> Iterator[Greedy]:
    """Under both choices of both kinds, each order once: a choice that never mattered is not tried the other way. Each is to
    be run before the next one. One that gave up says nothing of what would have mattered later, and nothing hangs on it: the
    other choice would have given up at the same piece.
    """
    written: list[tuple[Choices, Greedy]] = []
    for one_more, fill in product((False, True), repeat=2):
        choices = Choices(one_more=one_more, fill=fill)
        if any(_is_same(choices, other, greedy) for other, greedy in written):
            continue
        greedy = Greedy(costs, links, num_microbatches, limit_bytes, choices)
        written.append((choices, greedy))
        yield greedy


def _order(codes: tuple[list[int], ...], num_microbatches: int) -> PipelineOrder:
    return PipelineOrder(
        num_devices=len(codes),
        num_chunks=len(codes),
        num_microbatches=num_microbatches,
        codes=codes,
        ending=Ending.POST_VALIDATED,
    )


def _is_same(choices: Choices, other: Choices, greedy: Greedy) -> bool:
    """Whether what `greedy` wrote under other choices is what these would have written."""
    return (choices.one_more == other.one_more or not greedy.one_more_mattered) and (
        choices.fill == other.fill or not greedy.fill_mattered
    )


@lru_cache(maxsize=64)
def _graph_by_hand(
    drawn: Callable[[int, int], PipelineOrder], num_devices: int, num_microbatches: int
) -> PipelineGraph:
    return pipeline_graph(drawn(num_devices, num_microbatches))
