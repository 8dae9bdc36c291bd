"""What is alive in each segment of a step when chosen units recompute their forward in the backward.

A recomputed unit's own saved tensors (`Inner`) die in its forward and come back before its backward. A
tensor between units (`BoundaryTensor`) lives until its last use in the forward, the release by every unit
that still saves it, and the end of every recomputed unit that takes it as input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from memadvisor.cost.step import BoundaryTensor, Bytes, CapturedStep, Level, Segment

View = Literal["captured", "own_gradients", "passing_gradients", "collected_gradients"]

# Checkpointing keeps the CPU generator's state of each forward that it will run again, to draw the same
# numbers (torch.utils.checkpoint, preserve_rng_state): a tensor of so many bytes, on the CPU.
RNG_STATE_BYTES = 5056


class Activations:
    """Levels of a step under a choice of recomputed units; `view` names one of cost/step.py's."""

    def __init__(self, step: CapturedStep, recomputed: Collection[str]) -> None:
        self.step = step
        self.recomputed = frozenset(recomputed)
        num_segments = len(step.segments)
        during = _Changes(num_segments)
        at_start = _Changes(num_segments)
        for change in _changes(step, self.recomputed):
            during.add(change.category, change.first, change.last - change.ends_inside, change.delta_bytes)
            at_start.add(change.category, change.first, change.last, change.delta_bytes)
        self._during = during.sums()
        self._at_start = at_start.sums()

    def start(self, position: int, view: View) -> dict[str, int]:
        """Alive when the segment begins, before anything is recomputed for it."""
        return _sum(_level(self.step.segments[position], view).start, self._at_start, position)

    def peak(self, position: int, view: View) -> dict[str, int]:
        """Alive at the segment's highest instant."""
        segment = self.step.segments[position]
        level = _level(segment, view)
        forgets = segment.phase == "forward" and segment.unit in self.recomputed
        return _sum(level.peak_unsaved if forgets else level.peak, self._during, position)

    def recomputation(self, position: int, view: View) -> dict[str, int]:
        """Alive at the highest instant of the forward that is run again before this backward."""
        backward = self.step.segments[position]
        growth = self.step.forwards[backward.unit, backward.micro_batch][0].growth
        return added(self.start(position, view), growth)


def _level(segment: Segment, view: View) -> Level:
    if view == "captured":
        return segment.captured
    if view == "own_gradients":
        return segment.own_gradients
    return segment.passing_gradients if view == "passing_gradients" else segment.collected_gradients


class _Changes:
    """Signed bytes added to ranges of segments, by category; sums cost one pass."""

    def __init__(self, num_segments: int) -> None:
        self._num_segments = num_segments
        self._steps: dict[str, list[int]] = {}

    def add(self, category: str, first: int, last: int, delta_bytes: int) -> None:
        if first <= last:
            steps = self._steps.setdefault(category, [0] * (self._num_segments + 1))
            steps[first] += delta_bytes
            steps[min(last, self._num_segments - 1) + 1] -= delta_bytes

    def sums(self) -> dict[str, list[int]]:
        return {category: list(accumulate(steps)) for category, steps in self._steps.items()}


@dataclass(frozen=True, slots=True)
class _Change:
    """Signed bytes from the start of one segment on; `ends_inside` the last, whose peak does not have them."""

    category: str
    first: int
    last: int
    delta_bytes: int
    ends_inside: bool = False


def _changes(step: CapturedStep, recomputed: frozenset[str]) -> Iterable[_Change]:
    remembered: set[tuple[str, int]] = set()
    for item in step.inner:
        if item.unit not in recomputed:
            continue
        own, size_bytes = item.category, item.size_bytes
        first, last = item.birth_segment + 1, item.freed_after_segment
        yield _Change(own, first, last, -size_bytes)
        yield _Change("temporary", first, last, size_bytes)
        yield _Change(own, last + 1, item.death_segment, -size_bytes, ends_inside=True)
        if step.device == "cpu" and (item.unit, item.death_segment) not in remembered:
            remembered.add((item.unit, item.death_segment))
            yield _Change("temporary", item.birth_segment, item.death_segment, RNG_STATE_BYTES)
    for tensor in step.boundaries:
        needed = needed_until(tensor, recomputed)
        death, size_bytes = tensor.death_segment, tensor.size_bytes
        if needed < death:
            yield _Change(tensor.category, needed + 1, death, -size_bytes, ends_inside=True)
        elif needed > death:
            yield _Change(tensor.category, death + 1, needed, size_bytes)


def needed_until(tensor: BoundaryTensor, recomputed: frozenset[str]) -> int:
    """The last segment that a tensor between units is alive in, when these units are recomputed."""
    if recomputed.isdisjoint(tensor.saved_until) and recomputed.isdisjoint(tensor.input_of):
        return tensor.death_segment
    needs = [tensor.last_use_segment]
    needs += [until for unit, until in tensor.saved_until.items() if unit not in recomputed]
    needs += [until for unit, until in tensor.input_of.items() if unit in recomputed]
    kept_by_autograd = max([tensor.last_use_segment, *tensor.saved_until.values()])
    if tensor.death_segment > kept_by_autograd:  # the script holds it
        needs.append(tensor.death_segment)
    return max(needs)


def _sum(level: Bytes, changes: dict[str, list[int]], position: int) -> dict[str, int]:
    total = dict(level)
    for category, sums in changes.items():
        total[category] = total.get(category, 0) + sums[position]
    return total


def added(level: Bytes, more: Bytes) -> dict[str, int]:
    """The sum of two levels. Not a Counter: these are made for every moment of every simulation."""
    total = dict(level)
    for category, size_bytes in more.items():
        total[category] = total.get(category, 0) + size_bytes
    return total
