"""Ways of the units of a chain, chosen from the first unit to the last: least added time within a budget.

Saved tensors of a chain live nested: those of early units outlast those of late ones. So the bytes that a choice frees at a
moment are those of all units before it, and a dynamic programme over (added time, freed bytes) with dominated pairs pruned
is exact for the level of a chain. Tensors that flow between units bend that a little; therefore every answer is played, and
the budget inside the programme is tightened until both agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, TypeVar

from memadvisor.cost.parts import Modules
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.outcomes import Played

_MAX_STATES = 4000  # kept after each unit; reached only where hundreds of units all differ
_MAX_TIGHTENINGS = 12

Way = TypeVar("Way")
Freed = tuple[tuple[int, int, int], ...]  # bytes that are not there from one segment on, to before another


@dataclass(frozen=True, slots=True)
class UnitWay:
    """Of a unit: nothing of it runs again, all of it, or parts; the seconds that this adds in all passes, and what it frees."""

    seconds: float = 0.0
    freed: Freed = ()
    is_whole: bool = False
    parts: tuple[Modules, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """In one pass: all that comes back in the same backward as what goes first."""
        end = min(self.freed, key=itemgetter(0))[1] if self.freed else 0
        return sum(size_bytes for _, last, size_bytes in self.freed if last == end)


NOTHING = UnitWay()
Taken = Mapping[str, UnitWay]


def whole_ways(step: CapturedStep) -> dict[str, UnitWay]:
    """Running all of a unit again, by unit, in the order in which they free what they keep alone."""
    freed: dict[str, list[tuple[int, int, int]]] = {}
    for item in step.inner:
        # One that owns no parameters, as a tied head, is not the plan's.
        if item.unit in step.recomputable:
            span = item.freed_after_segment + 1, item.death_segment, item.size_bytes
            freed.setdefault(item.unit, []).append(span)
    order = sorted(freed, key=lambda unit: freed[unit][0][0])
    return {unit: UnitWay(step.recomputable[unit], tuple(freed[unit]), is_whole=True) for unit in order}


class Chain:
    """`ways` by unit, in the order of their forwards; the first of each frees nothing. `play` takes a way of each unit.

    `needs[k]`: highest level where just the first k units' tensors are alive. `own[unit]`: the same for its own forward and
    backward, by its way. All before anything is freed, told by one play for each number of ways, in which all units go theirs.
    """

    def __init__(
        self,
        step: CapturedStep,
        ways: Mapping[str, Sequence[UnitWay]],
        play: Callable[[Taken], Played],
    ) -> None:
        self.ways = ways
        self._play = play
        self._sizes = {unit: [way.freed_bytes for way in own] for unit, own in ways.items()}
        num_segments = len(step.segments)
        depth = _sums(num_segments, ((*span, 1) for own in ways.values() for span in _merged(own)))
        self.needs = [0] * (len(ways) + 1)
        self.own = {unit: [0] * len(own) for unit, own in ways.items()}
        for number in range(max(map(len, ways.values()), default=0)):
            taken = {unit: own[min(number, len(own) - 1)] for unit, own in ways.items()}
            freed = _sums(num_segments, (each for way in taken.values() for each in way.freed))
            for position, total_bytes in play(taken).moments.totals():
                unit, place = step.segments[position].unit, depth[position]
                if unit is None or unit not in ways:
                    self.needs[place] = self.needs[place] if number else max(self.needs[place], total_bytes)
                elif number < len(ways[unit]):
                    self.own[unit][number] = max(self.own[unit][number], total_bytes + freed[position])

    def fitting(self, budget_bytes: int) -> tuple[Taken, Played] | None:
        """The fastest found whose play is within the budget, and that; None where none was found."""
        inner_budget_bytes, over_bytes = budget_bytes, 0
        before: Taken | None = None
        for _ in range(_MAX_TIGHTENINGS):
            taken = self.solve(inner_budget_bytes)
            if taken is None:
                return None
            played = self._play(taken)
            if played.peak_bytes <= budget_bytes:
                return taken, played
            # The same again: what it is over by is less than a unit.
            over_bytes = 2 * over_bytes if taken == before else played.peak_bytes - budget_bytes
            inner_budget_bytes -= over_bytes
            before = taken
        return None

    def solve(self, budget_bytes: int) -> Taken | None:
        """Ways of least added time such that each level less what is freed by then is within the budget."""
        states: list[State[UnitWay]] = [State(0.0, 0, None, None)]
        for position, (unit, ways) in enumerate(self.ways.items()):
            states = [s for s in states if self.needs[position] - s.freed_bytes <= budget_bytes]
            states = undominated(
                [
                    State(s.added_s + way.seconds, s.freed_bytes + size_bytes, s, way)
                    for way, size_bytes, level in zip(ways, self._sizes[unit], self.own[unit], strict=True)
                    for s in states
                    if level - s.freed_bytes <= budget_bytes
                ]
            )
        last = [s for s in states if self.needs[-1] - s.freed_bytes <= budget_bytes]
        if not last:
            return None
        chosen = min(last, key=lambda s: s.added_s).ways()
        return {unit: way for unit, way in zip(self.ways, chosen, strict=True) if way is not None}


@dataclass(slots=True)  # not frozen: so many are made that it would show
class State(Generic[Way]):
    """`previous` and `taken`, what the last unit does, lead back to all that was chosen."""

    added_s: float
    freed_bytes: int
    previous: State[Way] | None
    taken: Way | None

    def ways(self) -> list[Way | None]:
        """Of all units, in order."""
        found: list[Way | None] = []
        state = self
        while state.previous is not None:
            found.append(state.taken)
            state = state.previous
        return found[::-1]


def undominated(states: list[State[Way]]) -> list[State[Way]]:
    """Keep a state only if no other is as fast and frees as much."""
    states.sort(key=lambda s: (s.added_s, -s.freed_bytes))
    kept: list[State[Way]] = []
    for state in states:
        if not kept or state.freed_bytes > kept[-1].freed_bytes:
            kept.append(state)
    if len(kept) > _MAX_STATES:
        stride = len(kept) / _MAX_STATES
        kept = [kept[int(i * stride)] for i in range(_MAX_STATES - 1)] + [kept[-1]]
    return kept


def _merged(ways: Iterable[UnitWay]) -> list[tuple[int, int]]:
    """Overlapping spans of one unit as one: under autocast its cast weights are freed later than the rest."""
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
        steps[first] += number
        steps[last] -= number
    total, sums = 0, []
    for change in steps:
        total += change
        sums.append(total)
    return sums
