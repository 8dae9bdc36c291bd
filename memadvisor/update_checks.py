"""When a plan may update what, and what its updates go with."""

from __future__ import annotations

from collections.abc import Collection

from memadvisor.errors import PlanError
from memadvisor.plan import Plan


def check_updates(plan: Plan, stages: Collection[int], source: str) -> None:
    """Raise PlanError, naming `source`. `stages`: all that the plan, or a unit of it, has."""
    _check_early_updates(plan, stages, source)
    _check_optimizer_tiers(plan, source)
    _check_delay(plan, source)
    _check_updates_by_unit(plan, source)


def _check_early_updates(plan: Plan, stages: Collection[int], source: str) -> None:
    used = {unit.zero_stage for unit in plan.units} if plan.policy == "chosen" else stages
    if plan.update_in_backward and (plan.num_ranks == 1 or max(used, default=plan.zero_stage) < 2):
        where = "one rank" if plan.num_ranks == 1 else f"ZeRO stage {max(used, default=plan.zero_stage)}"
        raise PlanError(
            f"{source} updates in the backward with {where}, which keeps whole gradients until the optimizer step.",
            hint="it needs several ranks and stage 2 or 3.",
        )


def _check_optimizer_tiers(plan: Plan, source: str) -> None:
    tiers = plan.optimizer_tiers
    if tiers != {"device"} and plan.update_in_backward:
        raise PlanError(
            f"{source} updates in the backward, and keeps optimizer state on the {min(tiers - {'device'})}.",
            hint="leave one of them out: state is fetched in the optimizer step.",
        )


def _check_delay(plan: Plan, source: str) -> None:
    beside = {
        "several ranks": plan.num_ranks > 1,
        "all optimizer state on the device": plan.optimizer_tiers == {"device"},
        "parameters on host or disk": plan.parameter_tiers != {"device"},
        "offloaded activations": plan.activation_tiers != {"device"},
    }
    if plan.delayed_update and (found := [what for what, is_so in beside.items() if is_so]):
        raise PlanError(
            f"{source} delays updates, with {found[0]}.",
            hint="delay them on one rank, with --offload-optimizer alone.",
        )


def _check_updates_by_unit(plan: Plan, source: str) -> None:
    beside = {
        "updates in the backward, which are of single units": plan.update_in_backward,
        "fused updates, which allocate nothing": plan.fused_updates,
        "delayed ones": plan.delayed_update,
    }
    if plan.update_by_unit and (found := [what for what, is_so in beside.items() if is_so]):
        raise PlanError(
            f"{source} updates units one after another, and has {found[0]}.", hint="leave one of them out."
        )
