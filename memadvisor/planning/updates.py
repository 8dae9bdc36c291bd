"""Where units may be updated at other times than all together in the optimizer step."""

from __future__ import annotations

from memadvisor.cost.step import CapturedStep
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.plays import Plays
from memadvisor.planning.ranked import RankedPlan, may_wait_less, worthier
from memadvisor.planning.several_models import updates_apart


def may_update_early(step: CapturedStep, plays: Plays, stage: int) -> bool:
    """Whether units may be updated in the backward."""
    asked = plays.asked
    goes_beside = not (step.shard_groups or asked.optimizer_bits or len(plays.models) > 1)
    comes_in_order = not plays.has_any_order  # else the engine updates them in the optimizer step
    is_alone = step.leaves_gradients_alone and asked.chunked_loss is None
    return stage >= 2 and is_alone and goes_beside and comes_in_order


def may_update_by_unit(step: CapturedStep, plays: Plays, usual: RankedPlan) -> bool:
    """Whether units may be updated one after another in the optimizer step, and `usual`, which does not, pays for memory
    that this would free, or waits for what would travel under it."""
    if not step.may_update_by_unit or plays.asked.optimizer_bits is not None or updates_apart(step):
        return False
    plan = usual.plan
    pays = not usual.fits or bool(plan.recomputed_units or plan.parted_units)
    travels = plan.gathers_updated_later or plan.may_gather_before_forward
    return (step.updates_together and pays) or (travels and may_wait_less(usual))


def one_after_another(step: CapturedStep, plays: Plays, usual: RankedPlan) -> RankedPlan:
    """The same plan with units updated one after another, where it is worth that; else as it is."""
    plan = usual.plan
    if plan.update_in_backward or not may_update_by_unit(step, plays, usual):
        return usual
    arrangement = Arrangement(
        plan.units,
        plan.behind,
        plan.gather_depth,
        plan.shard_ranks,
        stretches=plan.stretches,
        secondary_ranks=plan.secondary_ranks,
        by_unit=True,
    )
    other = plays.ranked(step, arrangement, plays.play(step, arrangement).prediction())
    return worthier(usual, other)
