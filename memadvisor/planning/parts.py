"""What to run again inside units, where units and stretches as they are do not fit: operators that they do not keep, or parts
by themselves.

Parts (cost/parts.py): from several choices of units and stretches that need a little more than the budget, each unit at
whose backward, or second run, more than the budget is needed gets parts, the cheapest first, until all is within it. Of the
fastest result, parts that are not needed go again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from memadvisor.cost.parts import Modules
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.operators import OperatorSearch
from memadvisor.planning.outcomes import Played
from memadvisor.planning.recompute import choose_recomputed, smallest_peak
from memadvisor.planning.stretches import Nested, NestedSearch, nested_with

Play = Callable[[Nested], Played]

_RUNGS = 6  # budgets from which parts are tried
_HIGHEST_RUNG = 1.3  # of the least that units and stretches need
_MAX_TAKEN_OFF = 50  # units whose parts may turn out not to be needed


class InsideUnits:
    """`search`: of stretches. `has_parts`: whether parts may be chosen. `has_replay`: what a device's allocator reserves counts,
    which is known of units and their parts, and not of stretches and operators."""

    def __init__(
        self, step: CapturedStep, play: Play, search: NestedSearch, *, has_parts: bool, has_replay: bool
    ) -> None:
        self._step = step
        self._play = play
        self._search = search
        self._has_parts = has_parts
        self._has_replay = has_replay
        self._operators = OperatorSearch(step, lambda kept: play(nested_with(frozenset(kept), (), kept)))

    def fastest(self, budget_bytes: int, is_rough: bool) -> Nested | None:
        """The fastest found within the budget; where none is, that of least peak, if parts lower it."""
        has_operators = bool(self._step.operators) and not self._has_replay
        kept = self._operators.fastest(budget_bytes, is_rough=is_rough) if has_operators else None
        found = [] if kept is None else [nested_with(frozenset(kept), (), kept)]
        found += self._with_parts(budget_bytes)
        fitting = [nested for nested in found if self._play(nested).peak_bytes <= budget_bytes]
        if fitting:
            best = min(fitting, key=lambda nested: self._play(nested).step_time_s)
            return self._without_needless(best, budget_bytes) if best.parts else best
        return min(found, key=lambda nested: self._play(nested).peak_bytes, default=None)

    def _with_parts(self, budget_bytes: int) -> list[Nested]:
        if not self._has_parts or not self._options:
            return []
        found = [self._lowered(start, budget_bytes) for start in dict.fromkeys(self._starts(budget_bytes))]
        return [nested for nested in found if nested.parts]

    @cached_property
    def _options(self) -> dict[str, list[tuple[Modules, ...]]]:
        """By unit; of one pass, since all are alike."""
        step = self._step
        return {unit: [one.modules for one in options.lower] for (unit, _), options in step.parted.items()}

    def _starts(self, budget_bytes: int) -> Iterator[Nested]:
        step, play = self._step, self._play
        least = smallest_peak(step, lambda units: play(Nested(units, ())))
        yield Nested(least.recomputed, ())
        smallest = None if self._has_replay else self._search.smallest()
        if smallest is not None:
            yield smallest
        least_bytes = max(
            budget_bytes, min(play(n).peak_bytes for n in (Nested(least.recomputed, ()), smallest) if n)
        )
        for rung in range(_RUNGS):
            target_bytes = int(least_bytes * (1 + (_HIGHEST_RUNG - 1) * rung / (_RUNGS - 1)))
            choice = choose_recomputed(
                step, lambda units: play(Nested(units, ())), target_bytes, polish=False
            )
            if choice is not None:
                yield Nested(choice.recomputed, ())
            nested = None if self._has_replay else self._search.fastest(target_bytes)
            if nested is not None:
                yield nested

    def _lowered(self, nested: Nested, budget_bytes: int) -> Nested:
        """With parts of each unit at which more than the budget is needed, until that is none, or parts do not help."""
        segments = self._step.segments
        held = {unit for pair in nested.stretches for unit in self._search.units_of(pair)}
        while (played := self._play(nested)).peak_bytes > budget_bytes:
            parts = dict(nested.parts)
            moments = played.moments
            over = {
                segments[at].unit or ""
                for at, total_bytes in zip(moments.segments, moments.totals_bytes, strict=True)
                if total_bytes > budget_bytes
            }
            lower = {unit: option for unit in over - held if (option := self._next(unit, parts)) is not None}
            if (segments[played.peak.segment].unit or "") not in lower:
                break
            nested = nested_with(nested.alone, nested.stretches, {}, parts={**parts, **lower})
        return nested

    def _next(self, unit: str, parts: Mapping[str, tuple[Modules, ...]]) -> tuple[Modules, ...] | None:
        """Parts of a unit that need less memory than those that it has."""
        options = self._options.get(unit, [])
        place = options.index(parts[unit]) + 1 if unit in parts else 0
        return options[place] if place < len(options) else None

    def _without_needless(self, nested: Nested, budget_bytes: int) -> Nested:
        """Fewer parts, as long as it fits."""
        for unit, _ in nested.parts[:_MAX_TAKEN_OFF]:
            parts = {other: modules for other, modules in nested.parts if other != unit}
            fewer = nested_with(nested.alone, nested.stretches, {}, parts=parts)
            if self._play(fewer).peak_bytes <= budget_bytes:
                nested = fewer
        return nested
