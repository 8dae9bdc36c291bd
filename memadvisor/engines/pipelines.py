"""Applying a plan with choices by rank: each process of a pipeline, or of a model whose layers are
split (tensor parallelism), follows its own, by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memadvisor.engines.activations.recompute import Note
from memadvisor.engines.applied import Applied
from memadvisor.engines.sharding.flat import Label
from memadvisor.errors import PlanError
from memadvisor.never_compiled import called_by_python
from memadvisor.plan import Plan
from memadvisor.plan_checks import check_plan
from memadvisor.units import counted


def install_stage(plan: Plan, rank: int, *, label: Label | None = None, note: Note | None = None) -> Applied:
    """As `install`, of the choices that `plan.ranks` has for this rank: nothing of a step passes between ranks but what the
    script itself sends."""
    check_plan(plan, "The plan")
    if rank >= plan.num_ranks:
        raise PlanError(
            f"The plan is for {counted(plan.num_ranks, 'rank')}, and this is rank {rank}.", hint=_HINT
        )
    applied = Applied(plan.of_rank(rank), label, note)
    applied.when_removed(
        register_optimizer_step_pre_hook(called_by_python(partial(_require_ranks, plan.num_ranks))).remove
    )
    return applied


_HINT = "profile this script and make its plan with `memadvisor advise`."


def _require_ranks(num_ranks: int, *_: Any) -> None:
    """Before an update: whether the script trains on as many ranks as it was planned for."""
    found = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if found != num_ranks:
        raise PlanError(
            f"The plan says what each of {num_ranks} ranks recomputes, and the script has {found}.",
            hint=_HINT,
        )
