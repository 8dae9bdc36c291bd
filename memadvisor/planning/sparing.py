"""What to run again of each unit where whole units would do: all of it, or parts that set more free for their seconds.

A GELU and the layer behind it, as one part, take the time of the GELU and set its output free; a whole block takes its
products again. Of each unit some choices of parts are known (analyzers/unit_parts.py). The dynamic programme is that of
recompute.py, from the first unit to the last over (added time, freed bytes), with more than two ways of each unit: what
a way frees from its forward to its backward, and how high the unit's own segments reach with it, is taken from one play
for each number of ways, in which all units go theirs. Every answer is played, the programme's budget tightened until both
agree, and then single units go ways of less time as long as all is within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from memadvisor.cost.parts import Modules
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.chain_states import State, undominated
from memadvisor.planning.outcomes import Played
from memadvisor.planning.stretches import Nested, nested_with

Play = Callable[[Nested], Played]

_MAX_TIGHTENINGS = 12
_MAX_TRIES = 200  # of single units that go another way


@dataclass(frozen=True, slots=True)
class _Way:
    """Of a unit: nothing of it runs again, all of it, or parts; seconds of all passes, bytes that one pass frees, and by
    pass from which segment on to which."""

    seconds: float = 0.0
    is_whole: bool = False
    parts: tuple[Modules, ...] = ()
    freed_bytes: int = 0
    freed: tuple[tuple[int, int, int], ...] = ()  # (from this segment on, to before that one, bytes)


NOTHING = _Way()
Taken = Mapping[str, _Way]


class SparingSearch:
    """Of one step of one rank, and one way of sharding it."""

    def __init__(self, step: CapturedStep, play: Play) -> None:
        self._step = step
        self._play = play

    def fastest(self, budget_bytes: int) -> Nested | None:
        """The fastest found within the budget; None where there is none, or no unit has parts to choose from."""
        if not any(len(ways) > 2 for ways in self._ways.values()):
            return None
        target_bytes, over_bytes = budget_bytes, 0
        before: Taken | None = None
        for _ in range(_MAX_TIGHTENINGS):
            taken = self._solve(target_bytes)
            if taken is None:
                return None
            peak_bytes = self._played(taken).peak_bytes
            if peak_bytes <= budget_bytes:
                return _nested(self._improved(taken, budget_bytes))
            # The same again: what it is over by is less than a way's.
            over_bytes = 2 * over_bytes if taken == before else peak_bytes - budget_bytes
            target_bytes -= over_bytes
            before = taken
        return None

    def _played(self, taken: Taken) -> Played:
        return self._play(_nested(taken))

    @cached_property
    def _ways(self) -> dict[str, list[_Way]]:
        """By unit, in the order of their forwards; the first is to run nothing again."""
        step, found = self._step, {}
        for unit in dict.fromkeys(segment.unit for segment in step.segments if segment.phase == "forward"):
            if unit is None or unit not in step.recomputable:
                continue
            found[unit] = [NOTHING, self._whole(unit), *self._in_parts(unit)]
        return found

    def _whole(self, unit: str) -> _Way:
        items = [item for item in self._step.inner if item.unit == unit]
        freed = tuple((item.freed_after_segment + 1, item.death_segment, item.size_bytes) for item in items)
        return _Way(self._step.recomputable[unit], is_whole=True, freed_bytes=_of_first(freed), freed=freed)

    def _in_parts(self, unit: str) -> Iterator[_Way]:
        passes = [options.sparing for (name, _), options in self._step.parted.items() if name == unit]
        cost = self._step.second_run_cost
        for of_all in zip(*passes, strict=False):
            freed = tuple(
                (one.forward + 1, min(storage.death_segment, one.backward), storage.size_bytes)
                for one in of_all
                for part in one.parts
                for storage in part.storages
            )
            seconds = sum(part.run.seconds(cost) for one in of_all for part in one.parts)
            yield _Way(seconds, parts=of_all[0].modules, freed_bytes=_of_first(freed), freed=freed)

    @cached_property
    def _levels(self) -> tuple[list[int], dict[str, list[int]]]:
        """The highest level where just the first k units' tensors are alive, by k; and of each unit's own segments, by its
        way. All before anything is freed."""
        segments, ways = self._step.segments, self._ways
        depth = _sums(
            len(segments),
            ((first, last, 1) for own in ways.values() for first, last in _together(own)),
        )
        needs = [0] * (len(ways) + 1)
        own: dict[str, list[int]] = {unit: [0] * len(choices) for unit, choices in ways.items()}
        for number in range(max(map(len, ways.values()))):
            taken = {unit: choices[min(number, len(choices) - 1)] for unit, choices in ways.items()}
            freed = _sums(len(segments), (each for way in taken.values() for each in way.freed))
            for position, total_bytes in self._played(taken).moments.totals():
                unit = segments[position].unit
                if unit not in ways:
                    place = depth[position]
                    needs[place] = needs[place] if number else max(needs[place], total_bytes)
                elif number < len(ways[unit]):
                    own[unit][number] = max(own[unit][number], total_bytes + freed[position])
        return needs, own

    def _solve(self, budget_bytes: int) -> Taken | None:
        """Ways of least added time such that each level less what is freed by then is within the budget."""
        needs, own = self._levels
        states: list[State[_Way]] = [State(0.0, 0, None, None)]
        for position, (unit, choices) in enumerate(self._ways.items()):
            states = [s for s in states if needs[position] - s.freed_bytes <= budget_bytes]
            states = undominated(
                [
                    State(s.added_s + way.seconds, s.freed_bytes + way.freed_bytes, s, way)
                    for way, level in zip(choices, own[unit], strict=True)
                    for s in states
                    if level - s.freed_bytes <= budget_bytes
                ]
            )
        last = [s for s in states if needs[-1] - s.freed_bytes <= budget_bytes]
        if not last:
            return None
        best = min(last, key=lambda s: s.added_s)
        return {unit: way or NOTHING for unit, way in zip(self._ways, best.ways(), strict=True)}

    def _improved(self, taken: Taken, budget_bytes: int) -> Taken:
        """Single units go ways of less time, those that spare most first, as long as it stays within the budget."""
        tries = 0
        while tries < _MAX_TRIES:
            for candidate in self._cheaper(taken):
                tries += 1
                if self._played(candidate).peak_bytes <= budget_bytes:
                    taken = candidate
                    break
                if tries == _MAX_TRIES:
                    break
            else:
                break
        return taken

    def _cheaper(self, taken: Taken) -> Iterator[Taken]:
        """With one unit another way, of units that have like ways the last alone: it frees its bytes for the shortest time."""
        last = {(way.seconds, way.freed_bytes): unit for unit, way in taken.items() if way != NOTHING}
        less = [
            (way.seconds - other.seconds, unit, other)
            for unit, way in ((unit, taken[unit]) for unit in last.values())
            for other in self._ways[unit]
            if other.seconds < way.seconds * (1 - 1e-9)
        ]
        for _, unit, other in sorted(less, key=lambda one: -one[0]):
            yield {**taken, unit: other}


def _nested(taken: Taken) -> Nested:
    whole = frozenset(unit for unit, way in taken.items() if way.is_whole)
    return nested_with(whole, (), {}, parts={unit: way.parts for unit, way in taken.items() if way.parts})


def _of_first(freed: tuple[tuple[int, int, int], ...]) -> int:
    """What the first pass frees: all that comes back in the same backward."""
    end = min(freed)[1] if freed else 0
    return sum(size_bytes for _, last, size_bytes in freed if last == end)


def _together(ways: list[_Way]) -> list[tuple[int, int]]:
    """Stretches of the step in which any of a unit's ways has something freed."""
    merged: list[tuple[int, int]] = []
    for first, last, _ in sorted(each for way in ways for each in way.freed):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _sums(num_segments: int, changes: Iterable[tuple[int, int, int]]) -> list[int]:
    """By segment, the sum of what is there from one segment on, to before another."""
    steps = [0] * (num_segments + 1)
    for first, last, number in changes:
        if first < last:
            steps[first] += number
            steps[last] -= number
    total, sums = 0, []
    for change in steps:
        total += change
        sums.append(total)
    return sums
