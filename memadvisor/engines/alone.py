"""Plans of one rank: a model whose parameters lie elsewhere has the executor of stage 3, without any other rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel, check_shardable
from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.flat import Label, Note
from memadvisor.engines.sharding.one_process import NoService, StateOf, make_pages
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.engines.sharding.sharded_step import is_elementwise
from memadvisor.errors import PlanError
from memadvisor.schedule import Schedule


def executor_of_one(
    model: LiveModel,
    schedule: Schedule,
    hooks: Hooks,
    label: Label,
    note: Note,
    state_of: StateOf,
    directory: Path,
) -> Executor:
    """Have the schedule's units lie where it says. Raises PlanError for models and tiers that this cannot be done with."""
    check_shardable(model.root, 3)
    paged = schedule.paged

    def pages(sharded: ShardedModel) -> None:
        make_pages([sharded.units[name] for name in paged], paged, directory, label, note)

    return Executor(model, schedule, None, hooks, label, False, lambda _: NoService(state_of), 0, note, pages)


def check_uncompiled(is_compiled: bool) -> None:
    """Raise PlanError for a model that torch.compile has made."""
    if is_compiled:
        raise PlanError(
            "Parameters of a model compiled by torch.compile cannot lie on another tier.",
            hint="run without torch.compile.",
        )


def check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for an optimizer that looks at more than one unit's elements at a time."""
    if not is_elementwise(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} needs whole parameters, and the plan has them on another tier, from where one "
            "unit after another is updated.",
            hint="leave parameters on the device, or use an optimizer of torch that updates element by element.",
        )


def require_one_rank(*_: Any) -> None:
    """Before an update: a script that no launcher has started may have started ranks by itself."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        num_ranks = dist.get_world_size()
        raise PlanError(
            f"The plan is for one rank, and the script has started {num_ranks} by itself.",
            hint=f"add --ranks {num_ranks}, or make a plan for them with `memadvisor advise --gpus {num_ranks}`.",
        )
