"""All units of one way: what choices of units to run again give, and the best of them within a budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from memadvisor.cost.limit import Limit
from memadvisor.cost.step import CapturedStep
from memadvisor.plan import Prediction
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.outcomes import Outcome, Played, outcome_of
from memadvisor.planning.parts import InsideUnits
from memadvisor.planning.recompute import choose_recomputed
from memadvisor.planning.sparing import SparingSearch
from memadvisor.planning.sparing_calls import SparedCalls
from memadvisor.planning.stretches import Nested, NestedSearch, Tables, nested_of
from memadvisor.planning.way import Way


class OneWay:
    """Of one step. `look` tells what an arrangement gives, which is remembered; `outcome` that as far as it is within a limit.

    `activation_tier`: where what autograd keeps goes, if anywhere. `tables`: see NestedSearch. may_nest: whether stretches
    of several units may run again as one. has_parts: whether parts of units may run again by themselves. has_replay: as
    InsideUnits has it.
    """

    def __init__(
        self,
        step: CapturedStep,
        way: Way,
        look: Callable[[Arrangement], Played],
        outcome: Callable[[Arrangement, Limit | None], Outcome],
        activation_tier: str,
        tables: Tables,
        *,
        may_nest: bool,
        has_parts: bool,
        has_replay: bool,
    ) -> None:
        self._step = step
        self._outcome = outcome
        self._may_nest = may_nest
        # Nothing here refers to this object, so that it and all that was played go with its last user.
        arranged = partial(_arranged, way, step, activation_tier)
        self.arranged: Callable[[Nested], Arrangement] = arranged
        self.play = cache(lambda nested: look(arranged(nested)))
        self.stretches = NestedSearch(step, self.play, tables=tables)
        self._inside = InsideUnits(
            step, self.play, self.stretches, has_parts=has_parts, has_replay=has_replay
        )
        self._sparing = SparingSearch(step, self.play)
        self._spared_calls, self._may_spare_calls = SparedCalls(step, self.play), not has_replay

    def evaluate(self, recomputed: frozenset[str]) -> Played:
        """With units that run again by themselves."""
        return self.play(Nested(recomputed, ()))

    def outcome(self, one: Arrangement, limit: Limit | None) -> Outcome:
        return outcome_of(self.play(nested_of(one))) if limit is None else self._outcome(one, limit)

    def peak_bytes(self, one: Arrangement) -> int:
        return self.play(nested_of(one)).peak_bytes

    def predict(self, arrangement: Arrangement) -> Prediction:
        return self.play(nested_of(arrangement)).prediction()

    def choose(self, target_bytes: int) -> Arrangement | None:
        """The fastest found whose peak is within the target."""
        choice = choose_recomputed(self._step, self.evaluate, target_bytes)
        alone = None if choice is None else Nested(choice.recomputed, ())
        nested = self.stretches.fastest(target_bytes) if self._may_nest and self._is_tight(alone) else None
        found = [one for one in (alone, nested) if one is not None]
        return self.arranged(min(found, key=lambda one: self.play(one).step_time_s)) if found else None

    def _is_tight(self, alone: Nested | None) -> bool:
        """Where few units are recomputed, keeping one input for several brings next to nothing."""
        chain = self.stretches.chain
        return alone is None or 2 * len(alone.alone & set(chain)) > len(chain)

    def spare(self, target_bytes: int) -> Arrangement | None:
        """The same with parts of units that set more free for their seconds, or some of a unit's calls."""
        choice = choose_recomputed(self._step, self.evaluate, target_bytes) if self._may_spare_calls else None
        calls = None if choice is None else self._spared_calls.of(choice.recomputed, target_bytes)
        found = [one for one in (self._sparing.fastest(target_bytes), calls) if one is not None]
        return self.arranged(min(found, key=lambda one: self.play(one).step_time_s)) if found else None

    def keep(self, target_bytes: int, is_rough: bool) -> Arrangement | None:
        """The same with a choice inside units."""
        nested = self._inside.fastest(target_bytes, is_rough)
        return None if nested is None else self.arranged(nested)


def _arranged(way: Way, step: CapturedStep, activation_tier: str, nested: Nested) -> Arrangement:
    return way.arranged(step, nested, activation_tier)
