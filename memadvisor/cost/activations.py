"""What is alive in each segment of a step when chosen units recompute their forward in the backward.

Which tensors come and go: activation_changes.py; what waits on another tier meanwhile: moved_activations.py; is in fewer
bits: rounded_activations.py; parts: parted_units.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from memadvisor.cost.activation_changes import (
    SegmentChanges,
    changes_of_kept,
    changes_of_moved,
    changes_of_recomputation,
    first_lives,
    let_go_in_runs,
)
from memadvisor.cost.kept import ForwardOperators
from memadvisor.cost.kept_calls import KeptCalls, with_calls_apart
from memadvisor.cost.level import Level
from memadvisor.cost.moved_activations import Away, Moves, units_away
from memadvisor.cost.parted_units import PartedUnits
from memadvisor.cost.parts import Modules
from memadvisor.cost.rounded_activations import RoundedActivations
from memadvisor.cost.second_run import RNG_STATE_BYTES
from memadvisor.cost.step import STATES, BoundaryTensor, Bytes, CapturedStep, Segment
from memadvisor.cost.stretches import Stretches
from memadvisor.schedule import Schedule
from memadvisor.stretches import Stretch

# Operators whose outputs stay, by unit that is recomputed by itself.
Kept = Mapping[str, tuple[str, ...]]
View = Literal["captured", "own_gradients", "passing_gradients", "collected_gradients", "loose_gradients"]


class Activations:
    """Levels of a step under a choice of stretches, of units whose activations are `away`, and of `bits` that others'
    are rounded to; `view` names one of cost/step.py's. `kept_calls`: of units in stretches, calls that do not run again."""

    def __init__(
        self,
        step: CapturedStep,
        stretches: Stretches,
        kept: Kept | None = None,
        away: Mapping[str, Away] | None = None,
        bits: Mapping[str, int] | None = None,
        parts: Mapping[str, tuple[Modules, ...]] | None = None,
        kept_calls: KeptCalls | None = None,
    ) -> None:
        self.step = step
        self._seen = step = with_calls_apart(step, kept_calls or {})
        self.stretches = stretches
        self.kept = dict(kept or {})
        chosen = dict(away or {}), dict(bits or {}), dict(parts or {}), dict(kept_calls or {})
        self.choices = stretches, self.kept, *chosen
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
        during = SegmentChanges(num_segments)
        at_start = SegmentChanges(num_segments)
        holding = self.parted.holding()
        lives = first_lives(step, stretches, holding)
        again = changes_of_recomputation(step, stretches, holding, lives)
        self._let_go = let_go_in_runs(step, stretches, lives)
        changes = (*again, *changes_of_kept(step, stretches, outputs))
        for change in (*changes, *self.parted.changes(), *changes_of_moved(self.moves)):
            during.add(change.category, change.first, change.last - change.ends_inside, change.delta_bytes)
            first = change.first + change.begins_inside
            at_start.add(change.category, first, change.last, change.delta_bytes)
        self._run_again: dict[int, list[tuple[Stretch, Bytes]]] = {}
        self._again_s: dict[tuple[Stretch, int | None], float] = {}
        self._during = during.sums()
        self._at_start = at_start.sums()
        self._during_bytes = during.totals()
        self._at_start_bytes = at_start.totals()

    def start(self, position: int, view: View) -> dict[str, int]:
        """Alive when the segment begins, before anything is recomputed for it."""
        start = _sum(_level(self._seen.segments[position], view).start, self._at_start, position)
        return start if self.rounded is None else added(start, self.rounded.at_start[position])

    def start_bytes(self, position: int, view: View) -> int:
        """All of `start`."""
        if self.rounded is not None:
            return sum(self.start(position, view).values())
        return self._seen.totals[view].start[position] + self._at_start_bytes[position]

    def start_changes(self) -> list[int]:
        """By segment, what is alive when it begins beyond what was captured."""
        return self._at_start_bytes[: len(self._seen.segments)]

    def peak_bytes(self, position: int, view: View) -> int:
        """All of `peak`."""
        if self.rounded is not None or position in self._places or position in self.parted:
            return sum(self.peak(position, view).values())
        totals = self._seen.totals[view]
        peaks = totals.peak_unsaved if self._forgets(position) else totals.peak
        return peaks[position] + self._during_bytes[position]

    def peak(self, position: int, view: View) -> dict[str, int]:
        """Alive at the segment's highest instant."""
        level = _level(self._seen.segments[position], view)
        if self.rounded is not None and self.rounded.changes_in(position):
            return _sum(self.rounded.peak(position, view, level.start), self._during, position)
        peak = self._peak_as_saved(level, position, view)
        return peak if self.rounded is None else added(peak, self.rounded.at_start[position])

    def rounding_s(self, position: int) -> float:
        """What rounding and bringing back take in a segment; 0 also where the run has not measured it."""
        cost = self._seen.rounding_cost
        return 0.0 if self.rounded is None or cost is None else self.rounded.seconds(position, cost)

    def _peak_as_saved(self, level: Level, position: int, view: View) -> dict[str, int]:
        if position in self.parted:
            return _sum(self.parted.peak(position, view, level.start), self._during, position)
        if position in self._places:
            operators = self._seen.operators[position]
            held = operators.held(self.kept[self._seen.segments[position].unit or ""])
            reached = operators.forward_peak(held)
            shown = reached if view == "captured" else {c: n for c, n in reached.items() if c not in STATES}
            return _sum(shown, self._during, position)
        return _sum(level.peak_unsaved if self._forgets(position) else level.peak, self._during, position)

    def _forgets(self, position: int) -> bool:
        """Whether it is a forward that keeps nothing but its inputs, or a backward that has to run one again."""
        segment = self._seen.segments[position]
        if segment.unit not in self.stretches:
            return False
        return segment.phase == "forward" or self.runs_again(position)

    def runs_again(self, position: int) -> bool:
        """Whether stretches are run again before this segment."""
        unit = self._seen.segments[position].unit
        return position in self._seen.first_backwards and bool(self.stretches.ending(unit or ""))

    def beside_again(self, position: int, view: View, growth: Bytes) -> Bytes:
        """What a run again of this growth has beside a segment's start; or what that has before it, if that is more."""
        level = _level(self._seen.segments[position], view)
        reached = added(level.until_asked, growth)
        return max(reached, level.most_until_asked, key=lambda sizes: sum(sizes.values()))

    def recomputations(self, position: int) -> list[tuple[Stretch, Bytes]]:
        """`_recomputations`, worked out once for all schedules that are played with this choice."""
        if position not in self._run_again:
            self._run_again[position] = self._recomputations(position)
        return self._run_again[position]

    def _recomputations(self, position: int) -> list[tuple[Stretch, Bytes]]:
        """Stretches that are run again before this backward, and what each has at its highest instant beside what is
        there when the backward first asks for something (`beside_again`)."""
        backward = self._seen.segments[position]
        level: dict[str, int] = {}  # of the stretches before
        found: list[tuple[Stretch, Bytes]] = []
        endings = self.stretches.ending(backward.unit or "")
        if len(endings) == 1 and len(endings[0]) == 1:
            alone = endings[0]
            growth = self._growth(alone[0], alone, alone, backward.pass_number)
            return [(alone, self._with_random_state(growth if sum(growth.values()) > 0 else {}))]
        for stretch in endings:
            highest, kept = self._run_of_several(stretch, position)
            found.append((stretch, self._with_random_state(added(level, highest))))
            level = added(level, kept)
        return found

    def _run_of_several(self, stretch: Stretch, position: int) -> tuple[Bytes, Bytes]:
        """The highest instant of a stretch's run before a backward, and what it leaves: all that its units save, and what
        inner stretches are given. What a unit behind takes, and nobody saves, is there until that has run."""
        number = self._seen.segments[position].pass_number
        units = [(unit, item) for item in self.stretches.runs(stretch) for unit in item]
        places = {unit: place for place, (unit, _) in enumerate(units)}
        highest: Bytes = {}
        kept: dict[str, int] = {}
        passing: list[tuple[int, Bytes]] = []  # until which place
        for place, (unit, item) in enumerate(units):
            there = kept
            for _, sizes in passing:
                there = added(there, sizes)
            reached = added(there, self._growth(unit, stretch, item, number))
            highest = max(highest, reached, key=lambda sizes: sum(sizes.values()))
            passing = [each for each in passing if each[0] > place]
            kept = added(kept, self._left_by(unit, stretch, item, position))
            for tensor in self._seen.made_by.get((unit, number), ()):
                size: Bytes = {tensor.category: tensor.size_bytes}
                last = max((places.get(user, -1) for user in tensor.input_of), default=-1)
                if self._stays(tensor, stretch, item):
                    kept = added(kept, size)
                elif last > place:
                    passing.append((last, size))
        return highest, kept

    def _with_random_state(self, sizes: Bytes) -> Bytes:
        """While a forward runs again with its own random state, the generator's is kept."""
        return added(sizes, {"temporary": RNG_STATE_BYTES}) if self._seen.device == "cpu" else sizes

    def _growth(self, unit: str, stretch: Stretch, item: Stretch, number: int | None) -> Bytes:
        """What a forward in a run of a stretch reaches, with the buffers that it changes as they were before."""
        growth = self._own_growth(unit, stretch, item, number)
        run = self._seen.second_runs.get((unit, number))
        return (
            growth if run is None or not run.copied_bytes else added(growth, {"temporary": run.copied_bytes})
        )

    def _own_growth(self, unit: str, stretch: Stretch, item: Stretch, number: int | None) -> Bytes:
        """The forward itself: torch's checkpointing, and ours, end with the last tensor saved."""
        segment = self._seen.forwards[unit, number][0]
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
        """`_seconds_again`, worked out once too."""
        if (stretch, number) not in self._again_s:
            self._again_s[stretch, number] = self._seconds_again(stretch, number)
        return self._again_s[stretch, number]

    def using_s(self, segment: Segment) -> float:
        """How long a backward takes to use what has been kept for it; one that runs its unit again does so there."""
        if segment.phase == "backward" and segment.unit in self.stretches:
            return self.again_s((segment.unit or "",), segment.pass_number)
        return segment.duration_s

    def _seconds_again(self, stretch: Stretch, number: int | None) -> float:
        """Its units' second forwards; the last one ends with the last tensor that it saves, and skips what is kept."""
        units = [unit for item in self.stretches.runs(stretch) for unit in item]
        runs = {unit: run for unit in units if (run := self._seen.second_runs.get((unit, number)))}
        cost = self._seen.second_run_cost
        again_s = sum(run.seconds(cost, stops=unit == stretch[-1]) for unit, run in runs.items())
        places = self._places_in(stretch[0], number) if len(stretch) == 1 else ()
        if not places:
            return again_s
        keeping_s = runs[stretch[0]].keeping_s(cost) if stretch[0] in runs else 0.0
        return again_s + keeping_s - self._operators_of(stretch[0], number).seconds(places)

    def _places_in(self, unit: str, number: int | None) -> Collection[int]:
        return self._places.get(self._seen.forward_at.get((unit, number), -1), ())

    def _operators_of(self, unit: str, number: int | None) -> ForwardOperators:
        return self._seen.operators[self._seen.forward_at[unit, number]]

    def _left_by(self, unit: str, stretch: Stretch, item: Stretch, position: int) -> Bytes:
        """What a unit's run adds beside what it makes for others, less what it alone was waited for with."""
        number = self._seen.segments[position].pass_number
        sizes: dict[str, int] = {}
        if not self.stretches.keeps_all(item, stretch):
            return sizes
        for inner in self._seen.inner_of.get((unit, number), ()):
            sizes[inner.category] = sizes.get(inner.category, 0) + inner.size_bytes
        if (run := self._seen.second_runs.get((unit, number))) and run.saved_copies_bytes:
            sizes["temporary"] = sizes.get("temporary", 0) + run.saved_copies_bytes
        gone = self._let_go.get((position, unit), {})
        return added(sizes, {category: -gone[category] for category in gone})

    def _stays(self, tensor: BoundaryTensor, stretch: Stretch, item: Stretch) -> bool:
        """Whether autograd, or an inner stretch, keeps what a run of a stretch makes of a tensor."""
        for other in self.stretches.body(stretch):
            if self.stretches.keeps_all(other, stretch):
                if other[0] in tensor.saved_until:
                    return True
            elif other != item and not tensor.input_of.keys().isdisjoint(other):
                return True
        return False


def _level(segment: Segment, view: View) -> Level:
    level: Level = getattr(segment, view)
    return level


def _places_kept(step: CapturedStep, kept: Kept) -> dict[int, frozenset[int]]:
    """By forward segment, the operators that are kept, where there are any."""
    if not kept:
        return {}
    found = {
        position: operators.places(kept.get(step.segments[position].unit or "", ()))
        for position, operators in step.operators.items()
    }
    return {position: places for position, places in found.items() if places}


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


def activations_under(
    step: CapturedStep, schedule: Schedule, known: Activations | None = None
) -> Activations:
    """What a schedule does to a step's activations; `known`: those of the same step and choices, if at hand."""
    stretches, bits = Stretches(schedule.stretches), schedule.activation_bits
    choices = stretches, schedule.kept, units_away(schedule), bits, schedule.parts, schedule.kept_calls
    if known is None or known.step is not step or known.choices != choices:
        return Activations(step, *choices)
    return known
