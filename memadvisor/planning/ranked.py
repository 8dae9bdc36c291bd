"""Plans with what they are predicted to give, in their order, and the front of peak against time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memadvisor.cost.step import CapturedStep
from memadvisor.plan import Plan, Prediction
from memadvisor.planning.arrangement import Arrangement

_RUNGS = 8  # budgets between the smallest peak and that without recomputation
# What updating in the backward must save of the step's time where a plan without it fits: a script may do in a later
# step what the traced one did not, and is stopped then.
_WORTH_EARLY = 0.01
# The same of activations elsewhere: what transfers take from compute is not predicted, and was 3 to 4 % of a step more
# than what second runs are predicted too low by (docs/planning/measured.md).
WORTH_MOVING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan and whether its predicted peak is within the budget.

    `changes_script`: its micro-batch and accumulation are the user's own settings, to be changed by hand. `step`: what it
    was played over.
    """

    plan: Plan
    prediction: Prediction
    fits: bool
    changes_script: bool
    step: CapturedStep = field(compare=False, repr=False)


def order(ranked: RankedPlan) -> tuple[bool, bool, float, int]:
    """Those that fit first; of these, those that leave the script alone; then by time, then by peak."""
    prediction = ranked.prediction
    if not ranked.fits:
        return True, False, prediction.needed_bytes, 0
    return False, ranked.changes_script, prediction.step_time_s, prediction.needed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A plan of the front: none known takes both less memory and less time. Both predicted."""

    peak_bytes: int
    step_time_s: float
    zero_stage: int
    num_recomputed: int
    num_parted: int = 0  # units with parts that run again
    num_offloaded: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of sharding with its best plan, and what else it gives: at most so many bytes, or None."""

    ranked: RankedPlan
    choose: Callable[[int], Arrangement | None]
    # With parts of units, where these may be; with units that keep some of what they would recompute; and with units whose
    # activations are elsewhere. Roughly, if so asked.
    spare: Callable[[int], Arrangement | None] | None
    keep: Callable[[int, bool], Arrangement | None] | None
    offload: Callable[[int, bool], Arrangement | None] | None
    predict: Callable[[Arrangement], Prediction]
    smallest: Arrangement
    largest: Arrangement


def is_worth_it(mixed: RankedPlan, best: RankedPlan) -> bool:
    """Another stage for each unit has to bring something: it fits alone, or it is faster."""
    if mixed.fits and best.fits:
        return mixed.prediction.step_time_s < best.prediction.step_time_s * (1 - 1e-9)
    return order(mixed) < order(best)


def worthier(usual: RankedPlan, other: RankedPlan) -> RankedPlan:
    """A plan that updates in the backward or unit by unit, moves activations, or has more under way, where it is needed to
    fit, or clearly faster; else the usual one."""
    if usual.fits and other.fits:
        worth = _WORTH_EARLY if other.plan.activation_tiers == {"device"} else WORTH_MOVING
        limit_s = usual.prediction.step_time_s * (1 - worth)
        return other if other.prediction.step_time_s < limit_s else usual
    return min(usual, other, key=order)


def may_wait_less(ranked: RankedPlan) -> bool:
    """Whether a plan that waits less for other ranks could be worth it beside this one."""
    prediction = ranked.prediction
    return prediction.exposed_communication_s > _WORTH_EARLY * prediction.step_time_s


def front_of(kind: Kind, budget_bytes: int) -> tuple[FrontPoint, ...]:
    """Peak against step time, from least memory to most."""
    low, high = (kind.predict(end).peak_bytes for end in (kind.smallest, kind.largest))
    targets = [low + (high - low) * rung // _RUNGS for rung in range(1, _RUNGS)] + [budget_bytes]
    found = [kind.choose(target) for target in targets]
    tried = [kind.smallest, kind.largest, *(one for one in found if one is not None)]
    front: list[FrontPoint] = []
    predicted = [(kind.predict(arrangement), arrangement) for arrangement in tried]
    for prediction, arrangement in sorted(
        predicted, key=lambda pair: (pair[0].peak_bytes, pair[0].step_time_s)
    ):
        if not front or prediction.step_time_s < front[-1].step_time_s * (1 - 1e-9):
            front.append(
                FrontPoint(
                    peak_bytes=prediction.peak_bytes,
                    step_time_s=prediction.step_time_s,
                    zero_stage=kind.ranked.plan.zero_stage,
                    num_recomputed=len(arrangement.recomputed_units),
                    num_parted=sum(bool(unit.parts) for unit in arrangement.units),
                    num_offloaded=len(arrangement.away),
                )
            )
    return tuple(front)


def with_other(
    kind: Kind, ranked: RankedPlan, other: Callable[[int, bool], Arrangement | None] | None, budget_bytes: int
) -> Kind:
    """A kind whose plan another search has found: of what it gives and what that one does, the faster; with other
    budgets roughly."""

    def choose(target_bytes: int) -> Arrangement | None:
        found = [kind.choose(target_bytes)]
        if other is not None:
            found.append(other(target_bytes, target_bytes != budget_bytes))
        fitting = [one for one in found if one is not None and kind.predict(one).peak_bytes <= target_bytes]
        return min(fitting, key=lambda one: kind.predict(one).step_time_s, default=None)

    return replace(kind, ranked=ranked, choose=choose)


def seconds_for(kind: Kind, budget_bytes: int, more_bytes: int) -> float | None:
    """How much faster a step gets with so many bytes beyond the budget; None where nothing fits the budget."""
    with_more = kind.choose(budget_bytes + more_bytes)
    if not kind.ranked.fits or with_more is None:
        return None
    return max(0.0, kind.ranked.prediction.step_time_s - kind.predict(with_more).step_time_s)
