"""A recorded pipeline, played again: who did what after what, with the seconds that each piece was measured to take.

The order of each rank is the one recorded, so it need not be one of those that are known by name. What a play does not
have (the loss of other stages than the last, the optimizer, Python between pieces, processors that ranks share) is the
rest of the measured step, and is taken to stay what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memadvisor.cost.pipelines.graph import PipelineGraph, pipeline_graph
from memadvisor.cost.pipelines.play import Floats, play, spans
from memadvisor.cost.pipelines.work import Codes, Kind, PipelineOrder, Work
from memadvisor.cost.step import CapturedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPipeline:
    """`step_s`: from the first piece to the last one's end. `busy_s`: by rank, seconds of its pieces."""

    step_s: float
    busy_s: tuple[float, ...]


class PlayedPiece(NamedTuple):
    """In seconds from the start of the pipeline's first piece."""

    work: Work
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class CapturedPipeline:
    """`schedule`: the class of the script's schedule. `steps`: by rank, its own step, in whose segments a pass of a
    micro-batch through a stage has a number of its own: the place of the stage in the rank's `stages` times
    `num_micro_batches`, and the micro-batch. `works`: by rank, its pieces in order, `seconds` what each takes.
    `link_s`: over link d between ranks d and d+1, the last one between the last and the first; None where nothing of it
    was recorded. `is_blocking`: a rank computes nothing while it sends and receives. `step_time_s`: as measured.
    """

    schedule: str
    num_stages: int
    num_micro_batches: int
    steps: tuple[CapturedStep, ...]
    stages: tuple[tuple[int, ...], ...]
    works: tuple[tuple[Work, ...], ...]
    seconds: Mapping[Work, float]
    link_s: tuple[float | None, ...]
    is_blocking: bool
    step_time_s: float

    def play(self, added_s: Mapping[Work, float]) -> PlayedPipeline:
        """With some pieces longer than they were."""
        graph, durations = self._graph, self._durations(added_s)
        ends = self._ends(durations)
        _, makespan_s = spans(graph, durations, ends)
        busy = np.bincount(graph.device, weights=durations, minlength=len(self.works))
        return PlayedPipeline(step_s=makespan_s, busy_s=tuple(busy.tolist()))

    def _ends(self, durations: Floats) -> Floats:
        return play(self._graph, durations, [link_s or 0.0 for link_s in self.link_s], self.is_blocking)

    def pieces(self, added_s: Mapping[Work, float]) -> tuple[tuple[PlayedPiece, ...], ...]:
        """When each is done, by rank, in its order."""
        durations = self._durations(added_s)
        ends = self._ends(durations)
        starts = ends - durations
        first_s = float(starts.min())
        found: list[list[PlayedPiece]] = [[] for _ in self.works]
        rows = zip(self._graph.device.tolist(), self._works, starts.tolist(), ends.tolist(), strict=True)
        for device, work, start_s, end_s in rows:
            found[device].append(PlayedPiece(work, start_s - first_s, end_s - first_s))
        return tuple(tuple(sorted(own, key=lambda piece: piece.start_s)) for own in found)

    @cached_property
    def plain(self) -> PlayedPipeline:
        return self.play({})

    def work_of(self, rank: int, kind: Kind, number: int) -> Work:
        """The piece of a rank that has a pass's number in its step."""
        place, micro_batch = divmod(number, self.num_micro_batches)
        return Work(kind, self.stages[rank][place], micro_batch)

    def in_flight(self, rank: int) -> int:
        """The most passes whose forward has begun and whose backward has not ended."""
        level = most = 0
        for work in self.works[rank]:
            level += 1 if work.kind is Kind.F else -1
            most = max(most, level)
        return most

    @cached_property
    def _graph(self) -> PipelineGraph:
        codes = Codes(self.num_stages, self.num_micro_batches)
        order = PipelineOrder(
            num_devices=len(self.works),
            num_chunks=self.num_stages,
            num_microbatches=self.num_micro_batches,
            codes=tuple([codes.of(work) for work in own] for own in self.works),
        )
        return pipeline_graph(order)

    @cached_property
    def _works(self) -> tuple[Work, ...]:
        """In the graph's order of playing."""
        graph = self._graph
        kinds, chunks = np.divmod(graph.cost, self.num_stages)
        rows = zip(kinds.tolist(), chunks.tolist(), graph.microbatch.tolist(), strict=True)
        return tuple(Work(Kind(kind), chunk, micro_batch) for kind, chunk, micro_batch in rows)

    def _durations(self, added_s: Mapping[Work, float]) -> Floats:
        return np.array([self.seconds[work] + added_s.get(work, 0.0) for work in self._works])
