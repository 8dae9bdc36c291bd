"""Which tensors come and go, from segment to segment, when chosen units recompute their forward in the backward.

A recomputed unit's own saved tensors (`Inner`) die in its forward and come back when the stretch that it keeps
them for is run again: before its own backward, or that of the stretch's last unit. A tensor between units
(`BoundaryTensor`) lives until its last use in the forward, the release by every unit that still saves it, and
the second run of every recomputed unit that takes it as input from outside of its stretches: the last one, where several
stretches are around the unit. What a stretch makes again of it lives from there on until the last release by a unit that
saves it, or the last run of one that takes it into an inner stretch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from memadvisor.cost.kept import KeepableStorage
from memadvisor.cost.moved_activations import Moves
from memadvisor.cost.second_run import RNG_STATE_BYTES
from memadvisor.cost.step import BoundaryTensor, CapturedStep
from memadvisor.cost.stretches import Stretches


class SegmentChanges:
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

    def totals(self) -> list[int]:
        """Of all categories."""
        steps = list(self._steps.values()) or [[0] * (self._num_segments + 1)]
        return list(accumulate(map(sum, zip(*steps, strict=True))))


@dataclass(frozen=True, slots=True)
class SegmentChange:
    """Signed bytes in a range of segments.

    `begins_inside` the first, whose start does not have them; `ends_inside` the last, whose peak does not.
    """

    category: str
    first: int
    last: int
    delta_bytes: int
    ends_inside: bool = False
    begins_inside: bool = False


class FirstLife(NamedTuple):
    """Of a tensor between units, as the first forward made it: who did, and the last segment that it is alive in; there,
    `ends_inside`, for a second run alone."""

    tensor: BoundaryTensor
    maker: str | None
    needed: int
    ends_inside: bool


def first_lives(step: CapturedStep, stretches: Stretches, holding: Set[str]) -> list[FirstLife]:
    """Of those that units which run again take or save. `holding`: units with a part that holds what the unit is called
    with."""
    lives = []
    for tensor, users in zip(step.boundaries, step.users, strict=True):
        if not users.isdisjoint(stretches.units):
            maker = step.maker_of(tensor)
            needed = needed_until(tensor, stretches, maker, step)
            ends_inside = needed_for_second_run(tensor, stretches, needed, holding, step)
            lives.append(FirstLife(tensor, maker, needed, ends_inside))
    return lives


def changes_of_recomputation(
    step: CapturedStep, stretches: Stretches, holding: Set[str], lives: Iterable[FirstLife]
) -> Iterable[SegmentChange]:
    """`holding`, `lives`: as of first_lives."""
    passes: dict[tuple[str, int], int] = {}  # by unit and forward, where the last that it keeps goes
    for item in step.inner if stretches.units else ():
        if item.unit not in stretches:
            continue
        own, size_bytes = item.category, item.size_bytes
        first, last = item.birth_segment + 1, item.freed_after_segment
        back = min(item.death_segment, _run_again_at(step, stretches, item.unit, item.birth_segment))
        yield SegmentChange(own, first, last, -size_bytes)
        yield SegmentChange("temporary", first, last, size_bytes)
        yield SegmentChange(own, last + 1, back, -size_bytes, ends_inside=True)
        for from_segment, to_segment in item.earlier_copies:
            yield SegmentChange(own, from_segment, to_segment, size_bytes, begins_inside=True)
        passed = item.unit, item.birth_segment
        passes[passed] = max(item.death_segment, passes.get(passed, 0))
    for (unit, forward), backward in passes.items():
        yield from _put_back(step, stretches, unit, forward, backward)
    yield from _states_of_others(step, stretches)
    for item in step.cached:
        if item.unit in stretches:
            first, last = item.freed_after_segment + 1, item.death_segment
            yield SegmentChange(item.category, first, last, -item.size_bytes)
    for tensor, maker, needed, ends_inside in lives:
        death, size_bytes = tensor.death_segment, tensor.size_bytes
        if needed < death:
            first = needed if ends_inside else needed + 1
            yield SegmentChange(tensor.category, first, death, -size_bytes, begins_inside=ends_inside)
        elif needed > death:
            yield SegmentChange(tensor.category, death, death, tensor.missed_bytes, begins_inside=True)
            yield SegmentChange(tensor.category, death + 1, needed, size_bytes, ends_inside=ends_inside)
        for first, last in tensor.earlier_copies if maker in stretches else ():
            yield SegmentChange(tensor.category, first, last, size_bytes, begins_inside=True)
        if tensor.cast_again:
            yield from _cast_again(step, tensor, stretches, needed)
            continue
        for first, last, is_for_run in _made_again(step, tensor, stretches, maker, needed, holding):
            yield SegmentChange(
                tensor.category, first, last, size_bytes, begins_inside=True, ends_inside=is_for_run
            )


def _states_of_others(step: CapturedStep, stretches: Stretches) -> Iterable[SegmentChange]:
    """Units that save something, but nothing that is theirs alone: a layer that keeps what it is called with."""
    for key, run in step.second_runs.items():
        keeps = key[0] in stretches and run.num_saved and key not in step.inner_of
        if keeps and key in step.backwards:
            yield from _put_back(step, stretches, key[0], step.forward_at[key], step.backwards[key])


def _put_back(
    step: CapturedStep, stretches: Stretches, unit: str, forward: int, backward: int
) -> Iterable[SegmentChange]:
    """What is as it was in the first run while a unit runs again: the generator's state, and buffers that it changes."""
    run = step.second_runs.get((unit, step.segments[forward].pass_number))
    copied_bytes = 0 if run is None else run.copied_bytes
    if size_bytes := copied_bytes + (RNG_STATE_BYTES if step.device == "cpu" else 0):
        yield SegmentChange("temporary", forward, backward, size_bytes)
    if run is not None and run.saved_copies_bytes:
        again = min(backward, _run_again_at(step, stretches, unit, forward))
        yield SegmentChange("temporary", again, backward, run.saved_copies_bytes, begins_inside=True)


def changes_of_kept(
    step: CapturedStep, stretches: Stretches, outputs: Mapping[int, Sequence[KeepableStorage]]
) -> Iterable[SegmentChange]:
    """What stays is there from its forward until the run again takes it. `outputs`: by forward segment."""
    for position, storages in outputs.items():
        again = _run_again_at(step, stretches, step.segments[position].unit or "", position)
        for item in storages:
            last = again if item.death_segment is None else min(item.death_segment, again)
            yield SegmentChange(item.category, position + 1, last, item.size_bytes, ends_inside=True)


def changes_of_moved(moves: Moves) -> Iterable[SegmentChange]:
    """What waits on another tier is gone for whole segments."""
    for absence in moves.absences:
        storages = absence.storages
        yield SegmentChange(storages.category, absence.first, absence.last, -storages.size_bytes)


def _run_again_at(step: CapturedStep, stretches: Stretches, unit: str, forward: int) -> int:
    """The backward segment before which the innermost stretch of a unit is run again."""
    last = stretches.around(unit)[-1][-1]
    return step.backwards.get((last, step.pass_from(last, forward)), len(step.segments))


def needed_until(
    tensor: BoundaryTensor, stretches: Stretches, maker: str | None, step: CapturedStep | None = None
) -> int:
    """The last segment that a tensor between units, made by one of them, is alive in as the first forward made it. Without
    a `step` each unit runs again by itself."""
    users = {*tensor.saved_until, *tensor.input_of}
    if not any(unit in stretches for unit in users):
        return tensor.death_segment
    needs = [tensor.last_use_segment]
    needs += [until for unit, until in tensor.saved_until.items() if unit not in stretches]
    needs += [
        taken_until(tensor, unit, stretches, step)
        for unit in tensor.input_of
        if unit in stretches
        and (unit == maker or maker not in stretches.around(unit)[0])  # itself: an earlier call
    ]
    kept_by_autograd = max([tensor.last_use_segment, *tensor.saved_until.values()])
    if tensor.death_segment > kept_by_autograd:  # the script holds it
        needs.append(tensor.death_segment)
    return max(needs)


def taken_until(tensor: BoundaryTensor, unit: str, stretches: Stretches, step: CapturedStep | None) -> int:
    """The segment before which a unit has run again for good; of one that saves it then, that of its own backward."""
    until = tensor.input_of[unit]
    if step is None or len(stretches.around(unit)[-1]) == 1 or unit in tensor.saved_by_takers:
        return until
    forward = step.forward_at.get((unit, step.segments[until].pass_number))
    return until if forward is None else min(until, _run_again_at(step, stretches, unit, forward))


def needed_for_second_run(
    tensor: BoundaryTensor,
    stretches: Stretches,
    needed: int,
    holding: Set[str],
    step: CapturedStep | None = None,
) -> bool:
    """Whether in `needed`, the last segment that it is alive in (needed_until), it is there for a second run alone, whose
    end is its own; not for a part of the unit that holds it beyond that."""
    # Else the maker keeps what it makes again.
    kept = [
        u for unit, u in tensor.saved_until.items() if unit not in stretches or unit in tensor.saved_by_takers
    ]
    if needed <= max([tensor.last_use_segment, *kept]) or needed == tensor.death_segment:
        return False
    return holding.isdisjoint(_takers(tensor, stretches, needed, step))


def _takers(
    tensor: BoundaryTensor, stretches: Stretches, until: int, step: CapturedStep | None
) -> Iterable[str]:
    """Units that have it for a second run before this segment."""
    for unit in tensor.input_of:
        if unit in stretches and taken_until(tensor, unit, stretches, step) == until:
            yield unit


def let_go_in_runs(
    step: CapturedStep, stretches: Stretches, lives: Iterable[FirstLife]
) -> dict[tuple[int, str], dict[str, int]]:
    """By the segment before which a stretch of several units is run again, and the unit whose run is the last that needs it:
    the bytes, by category, that are gone for the units behind it in that run."""
    found: dict[tuple[int, str], dict[str, int]] = {}
    for tensor, _, needed, ends_inside in lives if not stretches.are_alone else ():
        if ends_inside:
            last = max(_takers(tensor, stretches, needed, step), key=lambda unit: -tensor.input_of[unit])
            sizes = found.setdefault((needed, last), {})
            sizes[tensor.category] = sizes.get(tensor.category, 0) + tensor.size_bytes
    return found


def _made_again(
    step: CapturedStep,
    tensor: BoundaryTensor,
    stretches: Stretches,
    maker: str | None,
    needed: int,
    holding: Set[str],
) -> list[tuple[int, int, bool]]:
    """From where to where copies of a tensor live that runs of stretches make, and whether they go with a second run;
    beyond the first one's end, but for that which its maker saves itself, and makes again while the script still holds the
    first."""
    lives = []
    beside = None
    for unit, until in tensor.saved_until.items():
        if unit in stretches:
            again = _run_again_at(step, stretches, unit, tensor.birth_segment)
            lives.append((min(until, again), until, False))
            if unit == maker and again <= until:
                beside = (again, min(until, needed), False)
    for unit, own in tensor.input_of.items():
        around = [s for s in stretches.around(unit) if maker in s]
        if around and around[-1] != stretches.around(unit)[-1]:
            until = taken_until(tensor, unit, stretches, step)
            ending = around[-1][-1]
            number = step.pass_from(ending, tensor.birth_segment)
            is_for_run = unit not in holding and unit not in tensor.saved_by_takers
            lives.append((step.backwards.get((ending, number), own), until, is_for_run))
    merged: list[tuple[int, int, bool]] = []
    for first, last, is_for_run in sorted(lives):
        first = max(first, needed + 1)
        if first > last:
            continue
        if merged and first <= merged[-1][1]:
            begun, end, is_till_run = merged[-1]
            goes_with_run = is_for_run if last > end else is_till_run and (is_for_run or last < end)
            merged[-1] = (begun, max(last, end), goes_with_run)
        else:
            merged.append((first, last, is_for_run))
    return merged if beside is None else [beside, *merged]


def _cast_again(
    step: CapturedStep, tensor: BoundaryTensor, stretches: Stretches, needed: int
) -> Iterable[SegmentChange]:
    """Second copies of a weight that autocast casts. Only the growth of the call that has cast it first knows of it."""
    own = step.segments[tensor.birth_segment].pass_number
    for unit, backward, until in tensor.cast_again:
        if unit in stretches and until > needed:
            knows = unit == step.maker_of(tensor) and step.segments[backward].pass_number == own
            first = max(backward, needed + 1)
            yield SegmentChange(tensor.category, first, until, tensor.size_bytes, begins_inside=knows)
