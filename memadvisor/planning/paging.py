"""Where optimizer state, activations and, on one rank, parameters may lie beside the device; and what that begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.plan import Plan, UnitPlan
from memadvisor.planning.ranked import RankedPlan, order
from memadvisor.planning.several_models import updates_apart
from memadvisor.schedule import Lane

# How units that lie elsewhere are gathered: whether they are read again for the backward, whether gradients leave under
# the next unit's backward, and how many units ahead are read.
WAYS = ((True, 0, 0), (True, 1, 1), (False, 1, 1))


def nearest_tier(step: CapturedStep, transfers: TransferTimes | None) -> str | None:
    """Where it may lie: as near as transfers are known; None for nowhere else, as where what FSDP2 holds on one rank alone is
    not played."""
    lanes = (Lane.DISK,) if step.device == "cpu" else (Lane.HOST, Lane.DISK)
    is_played = bool(step.shard_groups) or step.holder != "FSDP2"
    known = transfers.bandwidths if transfers is not None and is_played else ()
    return next((lane.value for lane in lanes if lane in known), None)


def may_page(step: CapturedStep, num_ranks: int) -> bool:
    """Whether parameters may lie elsewhere too: on one rank, of one model that is updated once a step, element by element."""
    if num_ranks > 1 or step.world_size > 1 or step.holder:
        return False
    if len(set(step.models.values())) > 1 or updates_apart(step):
        return False
    return not any(states.whole_updates for states in step.states.values())


def with_fewest_paged(ranked: RankedPlan, play: Callable[[tuple[UnitPlan, ...]], RankedPlan]) -> RankedPlan:
    """A plan that fits with parameters and gradients of all units elsewhere: with as many units as fit on the device,
    from the first one on or from the last, whichever is faster. More of them there never need less memory."""
    units, found = ranked.plan.units, [ranked]
    for order_of_units in (units, units[::-1]) if ranked.fits else ():
        low, high = 0, len(units)
        while low < high:
            middle = (low + high + 1) // 2
            other = play(_kept_here(units, order_of_units[:middle]))
            if other.fits:
                low = middle
                found.append(other)
            else:
                high = middle - 1
    return min(found, key=order)


def _kept_here(units: tuple[UnitPlan, ...], here: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    names = {unit.name for unit in here}
    return tuple(replace(u, parameter_tier="device") if u.name in names else u for u in units)


def paged_bytes(step: CapturedStep) -> int:
    """What a tier holds where all parameters and gradients lie there."""
    return sum(states.parameter_bytes + states.trainable_bytes for states in step.states.values())


def starting_bytes(step: CapturedStep, plan: Plan) -> int:
    """What is in memory before the first step of a plan whose parameters lie elsewhere: the script makes its model there.
    0 for other plans."""
    if plan.parameter_tiers == {"device"}:
        return 0
    return sum(states.parameter_bytes for states in step.states.values())
