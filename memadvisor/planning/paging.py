"""Where optimizer state, activations and, on one rank, parameters may lie beside the device; and what that begins with."""

from __future__ import annotations

from memadvisor.cost.flats import flat_bytes
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.plan import Plan
from memadvisor.schedule import Lane

# How units that lie elsewhere are gathered: whether they are read again for the backward, whether gradients leave under
# the next unit's backward, and how many units ahead are read.
WAYS = ((True, False, 0), (True, True, 1), (False, True, 1))


def nearest_tier(step: CapturedStep, transfers: TransferTimes | None) -> str | None:
    """Where it may lie: as near as transfers are known; None for nowhere else."""
    lanes = (Lane.DISK,) if step.device == "cpu" else (Lane.HOST, Lane.DISK)
    known = transfers.bandwidths if transfers is not None and not step.shard_groups else ()
    return next((lane.value for lane in lanes if lane in known), None)


def may_page(step: CapturedStep, num_ranks: int) -> bool:
    """Whether parameters may lie elsewhere too: on one rank, where every optimizer updates element by element."""
    if num_ranks > 1 or step.world_size > 1 or step.repeats > 1 or step.shard_groups:
        return False
    return not any(states.whole_updates for states in step.states.values())


def paged_bytes(step: CapturedStep) -> int:
    """What a tier holds where all parameters and gradients lie there."""
    return sum(states.parameter_bytes + states.trainable_bytes for states in step.states.values())


def starting_bytes(step: CapturedStep, plan: Plan) -> int:
    """What is in memory before the first step of a plan whose parameters lie elsewhere: the script makes its model there,
    and its parameters are put away one unit after another. 0 for other plans."""
    paged = [unit.name for unit in plan.units if unit.parameter_tier != "device"]
    if not paged:
        return 0
    largest = max(flat_bytes(step.states[name], 1, frozen=True) for name in paged if name in step.states)
    return sum(states.parameter_bytes for states in step.states.values()) + largest
