"""Applying a plan: to an unmodified script before it runs, or to a live model in Python."""

from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memadvisor.engines.activations.recompute import Note
from memadvisor.engines.alone import require_one_rank
from memadvisor.engines.applied import Applied
from memadvisor.engines.fsdp2 import uses_fsdp2
from memadvisor.engines.sharding.flat import Label
from memadvisor.engines.single_process import SingleProcess
from memadvisor.errors import PlanError
from memadvisor.never_compiled import called_by_python
from memadvisor.plan import Plan
from memadvisor.plan_checks import check_plan


def install(plan: Plan, *, label: Label | None = None, note: Note | None = None) -> Applied:
    """Patch torch so that the script's own DDP wrapper, or its first root model, follows `plan`.

    With a plan for several ranks, a script that knows of none is run data-parallel (single_process.py).
    """
    check_plan(plan, "The plan")
    if plan.num_ranks > 1:
        remove = SingleProcess(plan.num_ranks, note or (lambda level, text: None)).remove
    else:
        remove = register_optimizer_step_pre_hook(called_by_python(require_one_rank)).remove
    applied = Applied(plan, label, note)
    applied.when_removed(remove)
    return applied


def apply(
    plan: Plan,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    label: Label | None = None,
    note: Note | None = None,
) -> Applied:
    """Apply a plan to a live model, wrapped in DDP if the plan is for several ranks. Raises PlanError."""
    check_plan(plan, "The plan")
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer | None),
    ):
        if not isinstance(value, kind):
            raise PlanError(
                f"The {name} is of type {type(value).__name__}.",
                hint="call apply(plan, model, optimizer), of a torch.nn.Module and the torch.optim optimizer that trains it.",
            )
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise PlanError("The model has gradients.", hint="apply the plan right after optimizer.zero_grad().")
    applied = Applied(plan, label, note)
    try:
        if optimizer is not None:
            applied.meet(optimizer)
        if plan.num_ranks > 1 and not uses_fsdp2(model):
            applied.take_over(model)
        else:
            applied.unknown_module(model)
            applied.require_attached()
    except BaseException:
        applied.remove()
        raise
    return applied
