"""Where units may be updated at other times than all together in the optimizer step."""

from __future__ import annotations

from memadvisor.cost.step import CapturedStep
from memadvisor.planning.plays import Plays
from memadvisor.planning.ranked import RankedPlan
from memadvisor.planning.several_models import updates_apart


def may_update_early(step: CapturedStep, plays: Plays, stage: int) -> bool:
    """Whether units may be updated in the backward."""
    asked = plays.asked
    goes_beside = not (step.shard_groups or asked.optimizer_bits or len(plays.models) > 1)
    return stage >= 2 and step.leaves_gradients_alone and goes_beside and asked.chunked_loss is None


def may_update_by_unit(step: CapturedStep, plays: Plays, usual: RankedPlan) -> bool:
    """Whether units may be updated one after another in the optimizer step, and `usual`, which does not, pays for memory."""
    is_free = usual.fits and not (usual.plan.recomputed_units or usual.plan.parted_units)
    in_codes = plays.asked.optimizer_bits is not None
    return step.may_update_by_unit and not (is_free or in_codes or updates_apart(step))
