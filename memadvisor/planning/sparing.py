"""What to run again of each unit where whole units would do: all of it, or parts that set more free for their seconds.

A GELU and the layer behind it, as one part, take the time of the GELU and set its output free; a whole block takes its
products again. Of each unit some choices of parts are known (analyzers/unit_parts.py). The dynamic programme over the chain
(chain.py) has these ways of each unit beside nothing and all, and then single units go ways of less time as long as all is
within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from memadvisor.cost.parts import PartedPass
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.chain import NOTHING, Chain, Taken, UnitWay, whole_ways
from memadvisor.planning.outcomes import Played
from memadvisor.planning.stretches import Nested, nested_with

Play = Callable[[Nested], Played]

_MAX_TRIES = 200  # of single units that go another way


class SparingSearch:
    """Of one step of one rank, and one way of sharding it."""

    def __init__(self, step: CapturedStep, play: Play) -> None:
        self._step = step
        self._play = play

    def fastest(self, budget_bytes: int) -> Nested | None:
        """The fastest found within the budget; None where there is none, or no unit has parts to choose from."""
        if not any(len(ways) > 2 for ways in self._ways.values()):
            return None
        found = self._chain.fitting(budget_bytes)
        return None if found is None else _nested(self._improved(found[0], budget_bytes))

    def _played(self, taken: Taken) -> Played:
        return self._play(_nested(taken))

    @cached_property
    def _chain(self) -> Chain:
        return Chain(self._step, self._ways, self._played)

    @cached_property
    def _ways(self) -> dict[str, list[UnitWay]]:
        """By unit; the first is to run nothing again."""
        passes: dict[str, list[tuple[PartedPass, ...]]] = {}
        for (unit, _), options in self._step.parted.items():
            passes.setdefault(unit, []).append(options.sparing)
        return {
            unit: [NOTHING, whole, *self._in_parts(passes.get(unit, []))]
            for unit, whole in whole_ways(self._step).items()
        }

    def _in_parts(self, passes: list[tuple[PartedPass, ...]]) -> Iterator[UnitWay]:
        """A way for each choice, which all passes have alike."""
        cost = self._step.second_run_cost
        for of_all in zip(*passes, strict=True):
            freed = tuple(
                (storage.unsaved[0] + 1, min(storage.death_segment, one.backward), storage.size_bytes)
                for one in of_all
                for part in one.parts
                for storage in part.storages
            )
            seconds = sum(part.run.seconds(cost) for one in of_all for part in one.parts)
            yield UnitWay(seconds, freed, parts=of_all[0].modules)

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
