"""Layouts with what they are predicted to take: which comes first, which are near-equals, and the front of memory against
time."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from memadvisor.cost.layouts.estimate import StepEstimate
from memadvisor.layout import RECOMPUTE, Layout
from memadvisor.planning.layout_space import Split

# Layouts of one kind that differ by less than this share in time and in memory are one answer.
CLOSE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout and what it is predicted to take."""

    layout: Layout
    estimate: StepEstimate


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
        len(layout.zeropp),
        layout.zeropp,
    )


def split_of(layout: Layout) -> Split:
    return Split(layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert)


def are_close(one: Priced, other: Priced) -> bool:
    """Whether they differ in details: tensor, pipeline, what ZeRO shards (nothing, states, parameters too) and
    recomputation are the same, both lose digits in collectives or neither does, and neither time nor memory differs by
    `CLOSE` of the smaller.
    """
    return _kind(one.layout) == _kind(other.layout) and all(
        max(pair) < (1 + CLOSE) * min(pair)
        for pair in (
            (one.estimate.step_time_s, other.estimate.step_time_s),
            (one.estimate.peak_memory_bytes, other.estimate.peak_memory_bytes),
        )
    )


def _kind(layout: Layout) -> tuple[object, ...]:
    return layout.tensor, layout.pipeline, (layout.zero_stage + 1) // 2, layout.recompute, layout.is_lossy


def told_apart(layouts: list[Priced], num_best: int) -> tuple[Priced, ...]:
    """The first few of which none is close to one before it."""
    kept: list[Priced] = []
    for one in layouts:
        if len(kept) == num_best:
            break
        if not any(are_close(one, before) for before in kept):
            kept.append(one)
    return tuple(kept)


def order_of(priced: Priced) -> tuple[object, ...]:
    return (priced.estimate.step_time_s, simplicity(priced.layout))


class Front:
    """Layouts of which none takes both less memory and less time, ascending in time; of equals the simpler stays."""

    def __init__(self) -> None:
        self.layouts: list[Priced] = []
        self._times_s: list[float] = []
        self._peaks_bytes: list[float] = []

    def room_bytes(self, least_s: float) -> float:
        """A layout that takes at least so long may be on it if it needs less than this."""
        place = bisect.bisect_right(self._times_s, least_s)
        if place == 0:
            return math.inf
        peak_bytes = self._peaks_bytes[place - 1]
        # Equal in both may be a tie that a simpler layout wins.
        return math.nextafter(peak_bytes, math.inf) if self._times_s[place - 1] == least_s else peak_bytes

    def add(self, new: Priced) -> None:
        time_s, peak_bytes = new.estimate.step_time_s, new.estimate.peak_memory_bytes
        place = bisect.bisect_right(self._times_s, time_s)
        if place:
            before_s, before_bytes = self._times_s[place - 1], self._peaks_bytes[place - 1]
            if before_bytes < peak_bytes or (before_bytes == peak_bytes and before_s < time_s):
                return
            is_equal = before_bytes == peak_bytes
            if is_equal and simplicity(self.layouts[place - 1].layout) <= simplicity(new.layout):
                return
            place -= before_s == time_s
        end = place
        while end < len(self.layouts) and self._peaks_bytes[end] >= peak_bytes:
            end += 1
        self.layouts[place:end] = [new]
        self._times_s[place:end] = [time_s]
        self._peaks_bytes[place:end] = [peak_bytes]
