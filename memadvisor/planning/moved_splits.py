"""Splits of the micro-batch with activations elsewhere: where nothing fits without them, or where they are faster by enough.

They are looked at when all splits have been searched, so that what fits is known: a split that computes as long, or nearly, is
left alone, and of the others no step is played further than to where it is over the budget, or too slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from memadvisor.cost.step import CapturedStep
from memadvisor.plan import Plan, Prediction
from memadvisor.planning.arrangement import Arrangement, num_moves
from memadvisor.planning.offload import OffloadSearch
from memadvisor.planning.one_way import OneWay
from memadvisor.planning.paging import nearest_tier
from memadvisor.planning.plays import Plays
from memadvisor.planning.ranked import WORTH_MOVING, RankedPlan, order
from memadvisor.planning.stretches import Nested
from memadvisor.planning.way import Way

# Of choices for a step: the fastest that fits, else the one of least peak.
Best = Callable[
    [
        CapturedStep,
        Callable[[int], Arrangement | None],
        Callable[[Arrangement], Prediction],
        Arrangement,
        list[Arrangement],
    ],
    RankedPlan,
]


@dataclass(frozen=True, slots=True)
class _Searched:
    """A split, a way of sharding it, and the best plan of that: it fits, or has the least peak."""

    step: CapturedStep
    way: Way
    ranked: RankedPlan


class MovedSplits:
    """Of one search. Nothing of what it has played is kept."""

    def __init__(self, plays: Plays) -> None:
        self._plays = plays
        self._searched: list[_Searched] = []

    def saw(self, step: CapturedStep, way: Way, ranked: RankedPlan) -> None:
        if step.repeats > 1 and not (way.early or way.pages) and nearest_tier(step, self._plays.transfers):
            self._searched.append(_Searched(step, way, ranked))

    def plans(self, known: Iterable[RankedPlan], best: Best) -> Iterator[RankedPlan]:
        """Those that are worth it beside all that is known, from few micro-batches to many."""
        fitting_s = min((one.prediction.step_time_s for one in known if one.fits), default=math.inf)
        for step in {id(one.step): one.step for one in self._searched}.values():
            self._plays.begin()
            own = [one for one in self._searched if one.step is step]
            for is_here in (True, False):  # optimizer state
                ways = [one for one in own if (one.way.tier == "device") is is_here]
                found = self._moved(ways, fitting_s * (1 - WORTH_MOVING), best)
                if found is not None:
                    yield found
                    if found.fits:
                        fitting_s = min(fitting_s, found.prediction.step_time_s)
                        break

    def _moved(self, ways: Iterable[_Searched], limit_s: float, best: Best) -> RankedPlan | None:
        """Of the best way that may be fast enough."""
        ways = [one for one in ways if self._plays.least_s(one.step, _plain(one)) < limit_s]
        if not ways:
            return None
        chosen = min(ways, key=lambda one: order(one.ranked))
        return self._with_moves(chosen, limit_s, best)

    def _with_moves(self, searched: _Searched, limit_s: float, best: Best) -> RankedPlan | None:
        step, plays = searched.step, self._plays
        tier, transfers = nearest_tier(step, plays.transfers), plays.transfers
        if tier is None or transfers is None:
            return None
        look, outcome = partial(plays.look, step), partial(plays.outcome, step)
        may_keep = plays.settings is None
        one = OneWay(
            step,
            searched.way,
            look,
            outcome,
            tier,
            {},
            may_nest=False,
            has_parts=False,
            has_replay=not may_keep,
        )
        moves = OffloadSearch(
            step, _plain(searched), tier, transfers, one.outcome, one.peak_bytes, may_keep=may_keep
        )
        starts = [_arrangement(searched.ranked.plan)]
        most = num_moves(step) // step.repeats
        if not math.isinf(limit_s):
            # What a device reserves takes long to replay: there it is for what fits in no other way.
            if plays.settings is not None:
                return None
            choice = moves.faster(plays.budget_bytes, starts, limit_s, most)
            return None if choice is None else plays.ranked(step, choice, one.predict(choice))
        lowest = moves.fastest(plays.budget_bytes, starts, most)
        if lowest is None:
            return None
        return best(step, lambda target: moves.fastest(target, starts, most), one.predict, lowest, [])


def _plain(one: _Searched) -> Arrangement:
    return one.way.arranged(one.step, Nested(frozenset(), ()), "device")


def _arrangement(plan: Plan) -> Arrangement:
    return Arrangement(
        plan.units, plan.behind, plan.gather_depth, plan.shard_ranks, secondary_ranks=plan.secondary_ranks
    )
