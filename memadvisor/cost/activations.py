"""What is alive in each segment of a step when chosen units recompute their forward in the backward.

A recomputed unit's own saved tensors (`Inner`) die in its forward and come back when the stretch that it keeps
them for is run again: before its own backward, or that of the stretch's last unit. A tensor between units
(`BoundaryTensor`) lives until its last use in the forward, the release by every unit that still saves it, and
the end of every recomputed unit that takes it as input from outside of its stretches. What a stretch makes again
of it lives from there on until the last release by a unit that saves it or takes it into an inner stretch.
What waits on another tier meanwhile: moved_activations.py; is in fewer bits: rounded_activations.py; parts: parts.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from memadvisor.cost.kept import ForwardOperators, KeepableStorage
from memadvisor.cost.moved_activations import Away, Moves
from memadvisor.cost.parts import Modules, PartedUnits
from memadvisor.cost.rounded_activations import RoundedActivations
from memadvisor.cost.second_run import RNG_STATE_BYTES
from memadvisor.cost.step import STATES, BoundaryTensor, Bytes, CapturedStep, Level, Segment
from memadvisor.cost.stretches import Stretches
from memadvisor.run.cut import innermost
from memadvisor.stretches import Stretch

# Operators whose outputs stay, by unit that is recomputed by itself.
Kept = Mapping[str, tuple[str, ...]]
View = Literal["captured", "own_gradients", "passing_gradients", "collected_gradients"]


class Activations:
    """Levels of a step under a choice of stretches, of units whose activations are `away`, and of `bits` that others'
    are rounded to; `view` names one of cost/step.py's."""

    def __init__(
        self,
        step: CapturedStep,
        stretches: Stretches,
        kept: Kept | None = None,
        away: Mapping[str, Away] | None = None,
        bits: Mapping[str, int] | None = None,
        parts: Mapping[str, tuple[Modules, ...]] | None = None,
    ) -> None:
        self.step = step
        self.stretches = stretches
        self.kept = dict(kept or {})
        self.choices = stretches, self.kept, dict(away or {}), dict(bits or {}), dict(parts or {})
        self.parted = PartedUnits(step, dict(parts or {}), stretches)
        self.rounded: RoundedActivations | None = None
        if bits:
            self.rounded = RoundedActivations(
                step.roundable, step.timelines, bits, tuple(stretches.units), step.device
            )
        self._places = _places_kept(step, self.kept)
        outputs = {at: step.operators[at].storages(chosen) for at, chosen in self._places.items()}
        self.moves = Moves(step, dict(away or {}), stretches, outputs)
        num_segments = len(step.segments)
        during = _Changes(num_segments)
        at_start = _Changes(num_segments)
        changes = (*_changes(step, stretches), *_changes_of_kept(step, stretches, outputs))
        changes += tuple(_Change(*change) for change in self.parted.changes())
        for change in (*changes, *_changes_of_moved(self.moves)):
            during.add(change.category, change.first, change.last - change.ends_inside, change.delta_bytes)
            first = change.first + change.begins_inside
            at_start.add(change.category, first, change.last, change.delta_bytes)
        self._during = during.sums()
        self._at_start = at_start.sums()
        self._during_bytes = during.totals()
        self._at_start_bytes = at_start.totals()

    def start(self, position: int, view: View) -> dict[str, int]:
        """Alive when the segment begins, before anything is recomputed for it."""
        start = _sum(_level(self.step.segments[position], view).start, self._at_start, position)
        return start if self.rounded is None else added(start, self.rounded.at_start[position])

    def start_bytes(self, position: int, view: View) -> int:
        """All of `start`."""
        if self.rounded is not None:
            return sum(self.start(position, view).values())
        return self.step.totals[view].start[position] + self._at_start_bytes[position]

    def start_changes(self) -> list[int]:
        """By segment, what is alive when it begins beyond what was captured."""
        return self._at_start_bytes[: len(self.step.segments)]

    def peak_bytes(self, position: int, view: View) -> int:
        """All of `peak`."""
        if self.rounded is not None or position in self._places or position in self.parted:
            return sum(self.peak(position, view).values())
        totals = self.step.totals[view]
        forgets = self._forgets(self.step.segments[position])
        return (totals.peak_unsaved if forgets else totals.peak)[position] + self._during_bytes[position]

    def peak(self, position: int, view: View) -> dict[str, int]:
        """Alive at the segment's highest instant."""
        segment = self.step.segments[position]
        level = _level(segment, view)
        if self.rounded is not None and self.rounded.changes_in(position):
            return _sum(self.rounded.peak(position, view, level.start), self._during, position)
        peak = self._peak_as_saved(segment, level, position, view)
        return peak if self.rounded is None else added(peak, self.rounded.at_start[position])

    def rounding_s(self, position: int) -> float:
        """What rounding and bringing back take in a segment; 0 also where the run has not measured it."""
        cost = self.step.rounding_cost
        return 0.0 if self.rounded is None or cost is None else self.rounded.seconds(position, cost)

    def _peak_as_saved(self, segment: Segment, level: Level, position: int, view: View) -> dict[str, int]:
        if position in self.parted:
            return _sum(self.parted.peak(position, view, level.start), self._during, position)
        if position in self._places:
            reached = self.step.operators[position].forward_peak(self._places[position])
            shown = reached if view == "captured" else {c: n for c, n in reached.items() if c not in STATES}
            return _sum(shown, self._during, position)
        return _sum(level.peak_unsaved if self._forgets(segment) else level.peak, self._during, position)

    def _forgets(self, segment: Segment) -> bool:
        """Whether it is a forward that keeps nothing but its inputs."""
        return segment.phase == "forward" and segment.unit in self.stretches

    def recomputations(self, position: int) -> list[tuple[Stretch, Bytes]]:
        """Stretches that are run again before this backward, and what each has at its highest instant beside what is
        there when the segment begins."""
        backward = self.step.segments[position]
        level: dict[str, int] = {}  # of the stretches before
        found: list[tuple[Stretch, Bytes]] = []
        endings = self.stretches.ending(backward.unit or "")
        if len(endings) == 1 and len(endings[0]) == 1:
            alone = endings[0]
            growth = self._growth(alone[0], alone, alone, backward.pass_number)
            return [(alone, self._with_random_state(growth if sum(growth.values()) > 0 else {}))]
        for stretch in endings:
            highest: Bytes = {}
            kept: dict[str, int] = {}
            for item in self.stretches.runs(stretch):
                passing: Bytes = {}  # what the unit before has made, where nobody keeps it
                for unit in item:
                    growth = self._growth(unit, stretch, item, backward.pass_number)
                    reached = added(added(kept, passing), growth)
                    highest = max(highest, reached, key=lambda sizes: sum(sizes.values()))
                    passing = self._made(unit, stretch, backward.pass_number)
                kept = added(kept, self._kept(item, stretch, backward.pass_number))
            found.append((stretch, self._with_random_state(added(level, highest))))
            level = added(level, kept)
        return found

    def _with_random_state(self, sizes: Bytes) -> Bytes:
        """While a forward runs again with its own random state, the generator's is kept."""
        return added(sizes, {"temporary": RNG_STATE_BYTES}) if self.step.device == "cpu" else sizes

    def _growth(self, unit: str, stretch: Stretch, item: Stretch, number: int | None) -> Bytes:
        """What a forward in a run of a stretch reaches: torch's checkpointing, and ours, end with the last tensor saved."""
        segment = self.step.forwards[unit, number][0]
        if places := self._places_in(unit, number):
            return self._operators_of(unit, number).growth(places)
        if (growth := self.parted.growth(unit, number)) is not None:
            return growth
        if len(stretch) == 1 or item == self.stretches.body(stretch)[-1]:
            return segment.growth
        keeps_all = self.stretches.keeps_all(item, stretch)
        level = segment.captured
        peak, start = level.peak if keeps_all else level.peak_unsaved, level.start
        return {c: peak.get(c, 0) - start.get(c, 0) for c in {**peak, **start} if c not in STATES}

    def again_s(self, stretch: Stretch, number: int | None) -> float:
        """Its units' second forwards; the last one ends with the last tensor that it saves, and skips what is kept."""
        units = [unit for item in self.stretches.runs(stretch) for unit in item]
        runs = {unit: run for unit in units if (run := self.step.second_runs.get((unit, number)))}
        cost = self.step.second_run_cost
        again_s = sum(run.seconds(cost, stops=unit == stretch[-1]) for unit, run in runs.items())
        places = self._places_in(stretch[0], number) if len(stretch) == 1 else ()
        if not places:
            return again_s
        keeping_s = runs[stretch[0]].keeping_s(cost) if stretch[0] in runs else 0.0
        return again_s + keeping_s - self._operators_of(stretch[0], number).seconds(places)

    def _places_in(self, unit: str, number: int | None) -> Collection[int]:
        return self._places.get(self.step.forward_at.get((unit, number), -1), ())

    def _operators_of(self, unit: str, number: int | None) -> ForwardOperators:
        return self.step.operators[self.step.forward_at[unit, number]]

    def _kept(self, item: Stretch, stretch: Stretch, number: int | None) -> Bytes:
        """What an item of a run leaves: all that its unit saves, or the input of an inner stretch, and its output."""
        sizes: dict[str, int] = {}
        keeps_all = self.stretches.keeps_all(item, stretch)
        for inner in self.step.inner_of.get((item[0], number), ()) if keeps_all else ():
            sizes[inner.category] = sizes.get(inner.category, 0) + inner.size_bytes
        return added(sizes, self._made(item[-1], stretch, number))

    def _made(self, unit: str, stretch: Stretch, number: int | None) -> Bytes:
        """What a unit makes for others of a stretch, and for itself."""
        sizes: dict[str, int] = {}
        for tensor in self.step.made_by.get((unit, number), ()):
            if any(user in stretch for user in (*tensor.input_of, *tensor.saved_until)):
                sizes[tensor.category] = sizes.get(tensor.category, 0) + tensor.size_bytes
        return sizes


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

    def totals(self) -> list[int]:
        """Of all categories."""
        steps = list(self._steps.values()) or [[0] * (self._num_segments + 1)]
        return list(accumulate(map(sum, zip(*steps, strict=True))))


@dataclass(frozen=True, slots=True)
class _Change:
    """Signed bytes in a range of segments.

    `begins_inside` the first, whose start does not have them; `ends_inside` the last, whose peak does not.
    """

    category: str
    first: int
    last: int
    delta_bytes: int
    ends_inside: bool = False
    begins_inside: bool = False


def _changes(step: CapturedStep, stretches: Stretches) -> Iterable[_Change]:
    remembered: set[tuple[str, int]] = set()
    for item in step.inner if stretches.units else ():
        if item.unit not in stretches:
            continue
        own, size_bytes = item.category, item.size_bytes
        first, last = item.birth_segment + 1, item.freed_after_segment
        back = min(item.death_segment, _run_again_at(step, stretches, item.unit, item.birth_segment))
        yield _Change(own, first, last, -size_bytes)
        yield _Change("temporary", first, last, size_bytes)
        yield _Change(own, last + 1, back, -size_bytes, ends_inside=True)
        if step.device == "cpu" and (item.unit, item.death_segment) not in remembered:
            remembered.add((item.unit, item.death_segment))
            last = item.death_segment + _goes_on(step, item.death_segment)
            yield _Change("temporary", item.birth_segment, last, RNG_STATE_BYTES)
    for tensor, users in zip(step.boundaries, step.users, strict=True):
        if users.isdisjoint(stretches.units):
            continue
        maker = step.maker_of(tensor)
        needed = needed_until(tensor, stretches, maker)
        death, size_bytes = tensor.death_segment, tensor.size_bytes
        if needed < death:
            yield _Change(tensor.category, needed + 1, death, -size_bytes)
        elif needed > death:
            yield _Change(tensor.category, death, death, tensor.missed_bytes, begins_inside=True)
            yield _Change(tensor.category, death + 1, needed, size_bytes)
        if tensor.cast_again:
            yield from _cast_again(step, tensor, stretches, needed)
            continue
        for first, last in _made_again(step, tensor, stretches, maker, needed):
            yield _Change(tensor.category, first, last, size_bytes, begins_inside=True)


def _goes_on(step: CapturedStep, position: int) -> bool:
    """Whether a unit's backward is told as that of the model around it: both return one tensor, so both begin at once."""
    if position + 1 >= len(step.segments):
        return False
    own, after = step.segments[position : position + 2]
    begin = step.backward_begins.get(own.micro_batch, position)
    is_last = all(segment.unit is None for segment in step.segments[begin:position])
    if own.unit is None or after.unit in (None, own.unit) or own.pass_number != after.pass_number:
        return False
    is_around = innermost(own.unit, (after.unit or "",)) is not None
    return is_last and is_around and after.phase == "backward"


def _places_kept(step: CapturedStep, kept: Kept) -> dict[int, frozenset[int]]:
    """By forward segment, the operators that are kept, where there are any."""
    found = {
        position: operators.places(kept.get(step.segments[position].unit or "", ()))
        for position, operators in step.operators.items()
    }
    return {position: places for position, places in found.items() if places}


def _changes_of_kept(
    step: CapturedStep, stretches: Stretches, outputs: Mapping[int, Sequence[KeepableStorage]]
) -> Iterable[_Change]:
    """What stays is there from its forward until the run again takes it. `outputs`: by forward segment."""
    for position, storages in outputs.items():
        again = _run_again_at(step, stretches, step.segments[position].unit or "", position)
        for item in storages:
            last = again if item.death_segment is None else min(item.death_segment, again)
            yield _Change(item.category, position + 1, last, item.size_bytes, ends_inside=True)


def _changes_of_moved(moves: Moves) -> Iterable[_Change]:
    """What waits on another tier is gone for whole segments."""
    for absence in moves.absences:
        storages = absence.storages
        yield _Change(storages.category, absence.first, absence.last, -storages.size_bytes)


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
) -> Iterable[_Change]:
    """Second copies of a weight that autocast casts. Only the growth of the call that has cast it first knows of it."""
    own = step.segments[tensor.birth_segment].pass_number
    for unit, backward, until in tensor.cast_again:
        if unit in stretches and until > needed:
            knows = unit == step.maker_of(tensor) and step.segments[backward].pass_number == own
            first = max(backward, needed + 1)
            yield _Change(tensor.category, first, until, tensor.size_bytes, begins_inside=knows)


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
