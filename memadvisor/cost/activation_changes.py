"""Which tensors come and go, from segment to segment, when chosen units recompute their forward in the backward.

A recomputed unit's own saved tensors (`Inner`) die in its forward and come back when the stretch that it keeps
them for is run again: before its own backward, or that of the stretch's last unit. A tensor between units
(`BoundaryTensor`) lives until its last use in the forward, the release by every unit that still saves it, and
the end of every recomputed unit that takes it as input from outside of its stretches; of one that runs again by itself
and does not save it, the end of its second run. What a stretch makes again of it lives from there on until the last
release by a unit that saves it or takes it into an inner stretch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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


def changes_of_recomputation(
    step: CapturedStep, stretches: Stretches, parted: Collection[str] = ()
) -> Iterable[SegmentChange]:
    """`parted`: units that have parts."""
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
    for tensor, users in zip(step.boundaries, step.users, strict=True):
        if users.isdisjoint(stretches.units):
            continue
        maker = step.maker_of(tensor)
        needed = needed_until(tensor, stretches, maker)
        ends_inside = needed_for_second_run(tensor, stretches, needed, parted)
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
        for first, last in _made_again(step, tensor, stretches, maker, needed):
            yield SegmentChange(tensor.category, first, last, size_bytes, begins_inside=True)


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


def needed_until(tensor: BoundaryTensor, stretches: Stretches, maker: str | None) -> int:
    """The last segment that a tensor between units, made by one of them, is alive in as the first forward made it."""
    users = {*tensor.saved_until, *tensor.input_of}
    if not any(unit in stretches for unit in users):
        return tensor.death_segment
    needs = [tensor.last_use_segment]
    needs += [until for unit, until in tensor.saved_until.items() if unit not in stretches]
    needs += [
        until
        for unit, until in tensor.input_of.items()
        if unit in stretches
        and (unit == maker or maker not in stretches.around(unit)[0])  # itself: an earlier call
    ]
    kept_by_autograd = max([tensor.last_use_segment, *tensor.saved_until.values()])
    if tensor.death_segment > kept_by_autograd:  # the script holds it
        needs.append(tensor.death_segment)
    return max(needs)


def needed_for_second_run(
    tensor: BoundaryTensor, stretches: Stretches, needed: int, parted: Collection[str]
) -> bool:
    """Whether in `needed`, the last segment that it is alive in (needed_until), it is there for a second run alone, whose end is its own. What a
    unit with parts is called with, a part may keep beyond that."""
    # Else the maker keeps what it makes again.
    kept = [
        u for unit, u in tensor.saved_until.items() if unit not in stretches or unit in tensor.saved_by_takers
    ]
    if needed <= max([tensor.last_use_segment, *kept]) or needed == tensor.death_segment:
        return False
    takers = [unit for unit, until in tensor.input_of.items() if until == needed and unit in stretches]
    return all(stretches.around(unit) == [(unit,)] and unit not in parted for unit in takers)


def _made_again(
    step: CapturedStep, tensor: BoundaryTensor, stretches: Stretches, maker: str | None, needed: int
) -> list[tuple[int, int]]:
    """From where to where copies of a tensor live that runs of stretches make; beyond the first one's end, but for that
    which its maker saves itself, and makes again while the script still holds the first."""
    lives = []
    beside = None
    for unit, until in tensor.saved_until.items():
        if unit in stretches:
            again = _run_again_at(step, stretches, unit, tensor.birth_segment)
            lives.append((min(until, again), until))
            if unit == maker and again <= until:
                beside = (again, min(until, needed))
    for unit, until in tensor.input_of.items():
        holding = [s for s in stretches.around(unit) if maker in s]
        if holding and holding[-1] != stretches.around(unit)[-1]:
            ending = holding[-1][-1]
            number = step.pass_from(ending, tensor.birth_segment)
            lives.append((step.backwards.get((ending, number), until), until))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(lives):
        first = max(first, needed + 1)
        if first > last:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
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
