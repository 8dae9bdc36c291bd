"""The fastest layouts that do not run out of memory, and the front of memory against time: exact, by branch and bound.

Layouts that share a device's work, a pipeline and its schedule make a node with one bound of its time. Nodes are opened
in the order of that bound. A layout is estimated unless bounds (layout_bounds.py) show that it is neither among the best
nor on the front. What comes out is what walking through all layouts gives, ties included
(tests/planning/test_layouts.py).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from memadvisor.cost.layouts.estimate import StepEstimate, estimate_step
from memadvisor.errors import UsageError
from memadvisor.layout import RECOMPUTE, Layout
from memadvisor.planning.layout_bounds import LayoutBounds
from memadvisor.planning.layout_space import (
    DeviceWork,
    LayoutQuestion,
    Split,
    States,
    make_layout,
    pipelines,
    splits,
    states,
    works,
)

# The front goes on to layouts that take this many times as long as the best.
FRONT_SLOWDOWN = 2.0
USUAL_BEST = 5
# Layouts of one kind that differ by less than this share in time and in memory are one answer.
CLOSE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout and what it is predicted to take."""

    layout: Layout
    estimate: StepEstimate


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
    """`best`: the fastest of each split over ranks (data, tensor, pipeline, context, expert), fastest first, without those
    that are close to one before them (`are_close`). `front`: no layout takes both less memory and less time, by ascending time. All are safe: their chance of running out of memory
    is below the question's.
    """

    best: tuple[Priced, ...]
    front: tuple[Priced, ...]
    counts: SearchCounts


def simplicity(layout: Layout) -> tuple[object, ...]:
    """Sorts layouts that are predicted the same: what is simpler to set up comes first. No two layouts are equal here."""
    return (
        layout.pipeline,
        layout.tensor,
        layout.context,
        layout.expert,
        layout.zero_stage,
        layout.offload_optimizer,
        RECOMPUTE.index(layout.recompute),
        layout.shard or layout.data,
        layout.chunks,
        layout.schedule != "1f1b",
        layout.schedule,
        layout.sequence_parallel,
        layout.context_kind,
        layout.micro_batch_size,
    )


def split_of(layout: Layout) -> Split:
    return Split(layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert)


def are_close(one: Priced, other: Priced) -> bool:
    """Whether they differ in details: tensor, pipeline, what ZeRO shards (nothing, states, parameters too) and recomputation
    are the same, and neither time nor memory differs by `CLOSE` of the smaller.
    """
    return _kind(one.layout) == _kind(other.layout) and all(
        max(pair) < (1 + CLOSE) * min(pair)
        for pair in (
            (one.estimate.step_time_s, other.estimate.step_time_s),
            (one.estimate.peak_memory_bytes, other.estimate.peak_memory_bytes),
        )
    )


def _kind(layout: Layout) -> tuple[object, ...]:
    return layout.tensor, layout.pipeline, (layout.zero_stage + 1) // 2, layout.recompute


def told_apart(layouts: list[Priced], num_best: int) -> tuple[Priced, ...]:
    """The first few of which none is close to one before it."""
    kept: list[Priced] = []
    for one in layouts:
        if len(kept) == num_best:
            break
        if not any(are_close(one, before) for before in kept):
            kept.append(one)
    return tuple(kept)


def search_layouts(
    question: LayoutQuestion, num_best: int = USUAL_BEST, front_slowdown: float = FRONT_SLOWDOWN
) -> FoundLayouts:
    """Both ends of the front are the best layout and the smallest one that takes at most `front_slowdown` times as long;
    1 leaves the front out but for the best. Nothing in `best` means that no layout is safe. Raises UsageError where a
    figure of the hardware is unknown.
    """
    search = _Search(question, num_best, front_slowdown)
    nodes = sorted(search.nodes(), key=lambda node: node.pipeline_s)
    for node in nodes:
        search.open(node)
    return search.found()


@dataclass(slots=True)
class _Node:
    """Layouts that differ in where their states are alone."""

    pipeline_s: float
    split: Split
    work: DeviceWork
    schedule: str
    chunks: int
    num_microbatches: int


@dataclass(slots=True)
class _Search:
    question: LayoutQuestion
    num_best: int
    front_slowdown: float
    bounds: LayoutBounds = field(init=False)
    best: dict[Split, Priced] = field(default_factory=dict)
    kth_s: float = math.inf
    fastest_s: float = math.inf
    front: list[Priced] = field(default_factory=list)
    num_layouts: int = 0
    num_estimated: int = 0
    num_too_slow: int = 0
    num_too_large: int = 0
    num_failed: int = 0

    def __post_init__(self) -> None:
        self.bounds = LayoutBounds(self.question)

    def nodes(self) -> Iterator[_Node]:
        question, bounds = self.question, self.bounds
        n_layers = question.model.n_layers
        for split in splits(question):
            num_states = len(states(question, split))
            for work in works(question, split):
                count = question.batch_sequences // split.data // work.micro_batch_size
                for schedule, chunks in pipelines(question.schedules, n_layers, split.pipeline, count):
                    self.num_layouts += num_states
                    if not bounds.can_be_dealt(split.pipeline, chunks):
                        self.num_failed += num_states
                        continue
                    pipeline_s = bounds.pipeline_seconds(work, split.pipeline, count, schedule, chunks)
                    yield _Node(pipeline_s, split, work, schedule, chunks, count)

    def open(self, node: _Node) -> None:
        """Estimate what of the node may be wanted."""
        ways = states(self.question, node.split)
        if not self._may_be_fast(node.split, node.pipeline_s) and node.pipeline_s > self._front_end_s():
            self.num_too_slow += len(ways)
            return
        limit, bounds = self.bounds.largest_safe_peak_bytes, self.bounds
        if self._peak_bytes(node, _most_sparing(ways)) > limit:
            self.num_too_large += len(ways)
            return
        for held in ways:
            least_bytes = self._peak_bytes(node, held)
            if least_bytes > limit:
                self.num_too_large += 1
                continue
            least_s = node.pipeline_s
            if self._is_wanted(node.split, least_s, least_bytes):
                least_s = bounds.step_seconds(
                    node.pipeline_s, node.work, node.split, node.schedule, node.chunks, held
                )
            if not self._is_wanted(node.split, least_s, least_bytes):
                self.num_too_slow += 1
                continue
            estimate = self._estimate(node, held)
            if estimate is not None and held.zero_stage < 3:
                # Those that gather no parameters share the pipeline's time; those that do take longer.
                node.pipeline_s = max(node.pipeline_s, _pipeline_seconds(estimate))

    def _peak_bytes(self, node: _Node, held: States) -> float:
        return self.bounds.peak_bytes(
            node.work, node.split, node.num_microbatches, node.schedule, node.chunks, held
        )

    def _estimate(self, node: _Node, held: States) -> StepEstimate | None:
        question = self.question
        layout = make_layout(question, node.split, node.work, node.schedule, node.chunks, held)
        try:
            estimate = estimate_step(question.model, question.step(layout), question.cluster)
        except UsageError:
            self.num_failed += 1
            return None
        self.num_estimated += 1
        if estimate.p_oom < question.max_p_oom:
            priced = Priced(layout=layout, estimate=estimate)
            self._keep_best(node.split, priced)
            self.front = with_point(self.front, priced)
        return estimate

    def _keep_best(self, split: Split, priced: Priced) -> None:
        known = self.best.get(split)
        if known is not None and _order(known) <= _order(priced):
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
        return self._may_be_fast(split, least_s) or self._may_be_on_front(least_s, least_bytes)

    def _may_be_fast(self, split: Split, least_s: float) -> bool:
        known = self.best.get(split)
        return least_s <= self.kth_s and (known is None or least_s <= known.estimate.step_time_s)

    def _front_end_s(self) -> float:
        return self.front_slowdown * self.fastest_s

    def _may_be_on_front(self, least_s: float, least_bytes: float) -> bool:
        if least_s > self._front_end_s():
            return False
        place = bisect.bisect_right(self.front, least_s, key=lambda one: one.estimate.step_time_s)
        if place == 0:
            return True
        faster = self.front[place - 1].estimate
        # Equal in both may be a tie that a simpler layout wins.
        return faster.peak_memory_bytes > least_bytes or (
            faster.peak_memory_bytes == least_bytes and faster.step_time_s == least_s
        )

    def found(self) -> FoundLayouts:
        best = told_apart(sorted(self.best.values(), key=_order), self.num_best)
        end_s = self._front_end_s()
        front = tuple(one for one in self.front if one.estimate.step_time_s <= end_s)
        return FoundLayouts(
            best=best,
            front=front,
            counts=SearchCounts(
                num_layouts=self.num_layouts,
                num_estimated=self.num_estimated,
                num_too_slow=self.num_too_slow,
                num_too_large=self.num_too_large,
                num_failed=self.num_failed,
            ),
        )


def _pipeline_seconds(estimate: StepEstimate) -> float:
    """What of a step is not once a step; a hair less, for sums are rounded."""
    once = estimate.time_s["gradients_and_parameters"] + estimate.time_s["optimizer"]
    return (estimate.step_time_s - once) * (1 - 1e-12)


def _most_sparing(ways: tuple[States, ...]) -> States:
    """States of which a device holds least, whatever else it does."""
    return max(ways, key=lambda held: (held.zero_stage, held.shard is None, held.offload_optimizer))


def _order(priced: Priced) -> tuple[object, ...]:
    return (priced.estimate.step_time_s, simplicity(priced.layout))


def with_point(front: list[Priced], new: Priced) -> list[Priced]:
    """The front, ascending in time and descending in memory, with one more layout; of equals the simpler stays."""
    time_s, peak_bytes = new.estimate.step_time_s, new.estimate.peak_memory_bytes
    place = bisect.bisect_right(front, time_s, key=lambda one: one.estimate.step_time_s)
    if place:
        before = front[place - 1].estimate
        if before.peak_memory_bytes < peak_bytes or (
            before.peak_memory_bytes == peak_bytes and before.step_time_s < time_s
        ):
            return front
        if before.peak_memory_bytes == peak_bytes and simplicity(front[place - 1].layout) <= simplicity(
            new.layout
        ):
            return front
        if before.step_time_s == time_s:
            place -= 1
    kept = [one for one in front[place:] if one.estimate.peak_memory_bytes < peak_bytes]
    return [*front[:place], new, *kept]
