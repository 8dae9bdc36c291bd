"""The fastest layouts that do not run out of memory, and the front of memory against time: exact, by branch and bound.

Layouts that share a device's work, a pipeline and its schedule make a node with one bound of its time. Bounds of time
and memory are there for the whole space, as arrays, before anything is estimated; nodes are opened, and then layouts estimated,
in the order of what they take at least. A layout is estimated unless its bounds (layout_time_bounds.py,
layout_memory_bounds.py) show that it is neither among the best nor on the front. What comes out is what walking through
all layouts gives, ties included (tests/planning/test_layouts.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import StepEstimate, estimate_step
from memadvisor.errors import UsageError
from memadvisor.planning.collecting import collecting_seldom
from memadvisor.planning.layout_memory_bounds import MemoryBounds
from memadvisor.planning.layout_shares import can_be_dealt
from memadvisor.planning.layout_space import (
    LayoutQuestion,
    Split,
    States,
    make_layout,
    pipelines,
    splits,
    states,
)
from memadvisor.planning.layout_time_bounds import TimeBounds
from memadvisor.planning.layout_works import Floats, Ints, WorkPrices, Works
from memadvisor.planning.priced_layouts import Front, Priced, order_of, told_apart

# The front goes on to layouts that take this many times as long as the best.
FRONT_SLOWDOWN = 2.0
USUAL_BEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCounts:
    """What became of the layouts of the space; the four sum to `num_layouts`.

    `num_too_slow` and `num_too_large` were left out by bounds; `num_failed` the cost model refused.
    """

    num_layouts: int
    num_estimated: int
    num_too_slow: int
    num_too_large: int
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayouts:
    """`best`: the fastest of each split over ranks (data, tensor, pipeline, context, expert), fastest first, without
    those that are close to one before them (`are_close`). `front`: no layout takes both less memory and less time, by
    ascending time. All are safe: their chance of running out of memory is below the question's. `smallest`: where none is
    safe the layout that needs least memory, if any can be estimated.
    """

    best: tuple[Priced, ...]
    front: tuple[Priced, ...]
    smallest: Priced | None
    counts: SearchCounts


def search_layouts(
    question: LayoutQuestion, num_best: int = USUAL_BEST, front_slowdown: float = FRONT_SLOWDOWN
) -> FoundLayouts:
    """Both ends of the front are the best layout and the smallest one that takes at most `front_slowdown` times as long;
    1 leaves the front out but for the best. Nothing in `best` means that no layout is safe. Raises UsageError where a
    figure of the hardware is unknown.
    """
    with collecting_seldom():
        return _Search(question, num_best, front_slowdown).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Layouts of one split and one schedule: a row for each way of working, a column for each way of holding states.

    `pipeline_s`: of rows, a bound of their forwards and backwards. `work_bytes`, `state_bytes`: of rows and of columns,
    on each device that may be the fullest.
    """

    split: Split
    schedule: str
    chunks: int
    works: Works
    ways: tuple[States, ...]
    pipeline_s: Floats
    work_bytes: Floats
    state_bytes: Floats


@dataclass(slots=True)
class _Node:
    """A row of a family. `pipeline_s`: the bound, or what the pipeline takes once it was played."""

    family: _Family
    row: int
    pipeline_s: float


# A layout with what it takes at least, by which they are ordered, and then by the turn: seconds, turn, node, the column of
# its way of holding states, bytes, and the node's `pipeline_s` when the seconds were found.
_Candidate = tuple[float, int, _Node, int, float, float]


class _Search:
    """Takes rows and layouts in the order of what they take at least."""

    def __init__(self, question: LayoutQuestion, num_best: int, front_slowdown: float) -> None:
        self.question = question
        self.num_best = num_best
        self.front_slowdown = front_slowdown
        prices = WorkPrices(question, FITTED)
        self.prices, self.times, self.memories = prices, TimeBounds(prices), MemoryBounds(prices)
        self.limit_bytes = self.memories.largest_safe_peak_bytes
        self.best: dict[Split, Priced] = {}
        self.kth_s = self.fastest_s = math.inf
        self.front = Front()
        self.candidates: list[_Candidate] = []
        self.num_layouts = self.num_too_large = self.num_estimated = self.num_failed = self.num_pushed = 0

    def run(self) -> FoundLayouts:
        families = list(self._families())
        for node, least_bytes in self._nodes(families):
            self._settle(node.pipeline_s)
            if node.pipeline_s > self.kth_s and node.pipeline_s > self._front_end_s():
                break
            if self._is_wanted(node.family.split, node.pipeline_s, least_bytes):
                self._open(node)
        self._settle(math.inf)
        return self._found(None if self.best else self._smallest(families))

    def _families(self) -> Iterator[_Family]:
        question = self.question
        for split in splits(question):
            works, ways = self.prices.of(split), states(question, split)
            rows_of: dict[tuple[str, int], list[int]] = {}
            for row, count in enumerate(works.num_microbatches.tolist()):
                for way in pipelines(question.schedules, question.model.n_layers, split.pipeline, count):
                    rows_of.setdefault(way, []).append(row)
            for (schedule, chunks), rows in rows_of.items():
                self.num_layouts += len(rows) * len(ways)
                if not can_be_dealt(question.model, question.software, split.pipeline, chunks):
                    self.num_failed += len(rows) * len(ways)
                    continue
                some = works.at(rows)
                yield _Family(
                    split=split,
                    schedule=schedule,
                    chunks=chunks,
                    works=some,
                    ways=ways,
                    pipeline_s=self.times.pipeline_seconds(split, some, schedule, chunks),
                    work_bytes=self.memories.work_bytes(split, some, schedule, chunks),
                    state_bytes=self.memories.state_bytes(split, ways, schedule, chunks),
                )

    def _nodes(self, families: list[_Family]) -> Iterator[tuple[_Node, float]]:
        """Those that may fit, by ascending bound of time, with the least that they need."""
        if not families:
            return
        least_bytes = []
        for family in families:
            peaks = self.memories.peak_bytes(family.work_bytes, family.state_bytes)
            self.num_too_large += int((peaks > self.limit_bytes).sum())
            least_bytes.append(peaks.min(axis=1))
        sizes = [len(family.pipeline_s) for family in families]
        seconds = np.concatenate([family.pipeline_s for family in families])
        smallest = np.concatenate(least_bytes)
        of_family = np.repeat(np.arange(len(families)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        fitting = np.flatnonzero(smallest <= self.limit_bytes)
        order = fitting[np.argsort(seconds[fitting], kind="stable")]
        for place in order.tolist():
            family = families[of_family[place]]
            yield _Node(family, int(row[place]), float(seconds[place])), float(smallest[place])

    def _open(self, node: _Node) -> None:
        """Bound what of the node may be wanted."""
        family = node.family
        row = family.work_bytes[node.row : node.row + 1]
        peaks = self.memories.peak_bytes(row, family.state_bytes)[0]
        room_bytes = self._room_bytes(family.split, node.pipeline_s)
        columns = np.flatnonzero((peaks <= self.limit_bytes) & (peaks < room_bytes))
        if len(columns):
            self._consider(node, columns, peaks[columns].tolist())

    def _consider(self, node: _Node, columns: Ints, least_bytes: list[float]) -> None:
        """Of the node these ways of holding states, which need so many bytes at least."""
        family = node.family
        bounds = self.times.step_seconds(
            node.pipeline_s,
            family.split,
            family.works,
            node.row,
            family.schedule,
            family.chunks,
            family.ways,
            columns,
        )
        for column, least_s, size_bytes in zip(columns.tolist(), bounds.tolist(), least_bytes, strict=True):
            if self._is_wanted(family.split, least_s, size_bytes):
                self.num_pushed += 1
                one = (least_s, self.num_pushed, node, column, size_bytes, node.pipeline_s)
                heapq.heappush(self.candidates, one)

    def _settle(self, until_s: float) -> None:
        """Estimate what is wanted of the candidates that may take no longer."""
        while self.candidates and self.candidates[0][0] <= until_s:
            least_s, _, node, column, least_bytes, pipeline_s = heapq.heappop(self.candidates)
            if not self._is_wanted(node.family.split, least_s, least_bytes):
                continue
            if pipeline_s < node.pipeline_s:  # more is known by now
                self._consider(node, np.array([column]), [least_bytes])
            else:
                self._estimate(node, node.family.ways[column])

    def _estimate(self, node: _Node, held: States) -> None:
        priced = self._priced(node.family, node.row, held)
        if priced is None:
            self.num_failed += 1
            return
        self.num_estimated += 1
        if priced.estimate.p_oom < self.question.max_p_oom:
            self._keep_best(node.family.split, priced)
            self.front.add(priced)
        if held.zero_stage < 3:
            # Those that gather no parameters share the pipeline's time; those that do take longer.
            node.pipeline_s = max(node.pipeline_s, _pipeline_seconds(priced.estimate))

    def _priced(self, family: _Family, row: int, held: States) -> Priced | None:
        """None where the cost model refuses it."""
        question, work = self.question, family.works.rows[row]
        layout = make_layout(question, family.split, work, family.schedule, family.chunks, held)
        try:
            estimate = estimate_step(question.model, question.step(layout), question.cluster)
        except UsageError:
            return None
        return Priced(layout=layout, estimate=estimate)

    def _smallest(self, families: list[_Family]) -> Priced | None:
        """That of all layouts which needs least memory, the fastest of equals; none of them is safe."""
        smallest: Priced | None = None
        peaks_of = {
            place: self.memories.peak_bytes(family.work_bytes, family.state_bytes)
            for place, family in enumerate(families)
        }
        for place in sorted(peaks_of, key=lambda place: float(peaks_of[place].min())):
            family, peaks = families[place], peaks_of[place]
            if smallest is not None and peaks.min() > smallest.estimate.peak_memory_bytes:
                break
            for index in np.argsort(peaks, axis=None).tolist():
                row, column = divmod(index, len(family.ways))
                if smallest is not None and peaks[row, column] > smallest.estimate.peak_memory_bytes:
                    break
                priced = self._priced(family, row, family.ways[column])
                if priced is not None and (smallest is None or _size(priced) < _size(smallest)):
                    smallest = priced
        return smallest

    def _keep_best(self, split: Split, priced: Priced) -> None:
        known = self.best.get(split)
        if known is not None and order_of(known) <= order_of(priced):
            return
        self.best[split] = priced
        # The fastest of each tensor and pipeline degree is close to none before it, whatever else will be found.
        fastest: dict[tuple[int, int], float] = {}
        for other, one in self.best.items():
            degrees = (other.tensor, other.pipeline)
            fastest[degrees] = min(fastest.get(degrees, math.inf), one.estimate.step_time_s)
        times = sorted(fastest.values())
        self.fastest_s = times[0]
        if len(times) >= self.num_best:
            self.kth_s = times[self.num_best - 1]

    def _is_wanted(self, split: Split, least_s: float, least_bytes: float) -> bool:
        return least_bytes < self._room_bytes(split, least_s)

    def _room_bytes(self, split: Split, least_s: float) -> float:
        """A layout of this split that takes at least so long is wanted if it needs less than this."""
        if least_s <= self.kth_s:
            known = self.best.get(split)
            if known is None or least_s <= known.estimate.step_time_s:
                return math.inf
        return self.front.room_bytes(least_s) if least_s <= self._front_end_s() else 0.0

    def _front_end_s(self) -> float:
        return self.front_slowdown * self.fastest_s

    def _found(self, smallest: Priced | None) -> FoundLayouts:
        end_s = self._front_end_s()
        passed = self.num_estimated + self.num_too_large + self.num_failed
        return FoundLayouts(
            best=told_apart(sorted(self.best.values(), key=order_of), self.num_best),
            front=tuple(one for one in self.front.layouts if one.estimate.step_time_s <= end_s),
            smallest=smallest,
            counts=SearchCounts(
                num_layouts=self.num_layouts,
                num_estimated=self.num_estimated,
                num_too_slow=self.num_layouts - passed,
                num_too_large=self.num_too_large,
                num_failed=self.num_failed,
            ),
        )


def _size(priced: Priced) -> tuple[object, ...]:
    return priced.estimate.peak_memory_bytes, *order_of(priced)


def _pipeline_seconds(estimate: StepEstimate) -> float:
    """What of a step is not once a step; a hair less, for sums are rounded."""
    once = estimate.time_s["gradients_and_parameters"] + estimate.time_s["optimizer"]
    return (estimate.step_time_s - once) * (1 - 1e-9)
