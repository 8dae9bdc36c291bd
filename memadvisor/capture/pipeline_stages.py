"""What stages of a `torch.distributed.pipelining` schedule this process holds, and how they are run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from memadvisor.run.cut import unwrap
from memadvisor.run.living import living
from memadvisor.run.parallel_records import PipelineStage

_SPLIT = ("BACKWARD_INPUT", "BACKWARD_WEIGHT")


def pipeline_stages(roots: Iterable[tuple[str, torch.nn.Module]]) -> list[PipelineStage]:
    """By stage. Empty where the script has none, or this torch's are other than those known here."""
    if "torch.distributed.pipelining.schedules" not in sys.modules:
        return []
    from torch.distributed.pipelining import schedules

    names = {id(root): prefix for prefix, root in roots}
    found: dict[int, PipelineStage] = {}
    for schedule in living(schedules._PipelineSchedule):
        try:
            for stage in _stages_of(schedule):
                name = names.get(id(unwrap(stage.submod)))
                if name is not None:
                    found[stage.stage_index] = _row(stage, name, schedule)
        except AttributeError:
            continue  # one that is being made, or of another torch
    return [found[index] for index in sorted(found)]


def _stages_of(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _row(stage: Any, model: str, schedule: Any) -> PipelineStage:
    order = getattr(schedule, "pipeline_order", None) or {}
    actions = [action for each in order.values() for action in each if action is not None]
    return PipelineStage(
        model=model,
        index=stage.stage_index,
        num_stages=stage.num_stages,
        position=stage.group_rank,
        num_ranks=stage.group_size,
        schedule=type(schedule).__name__,
        num_micro_batches=schedule._n_microbatches,
        splits_backward=any(action.computation_type.name in _SPLIT for action in actions),
        first_rank=min(dist.get_process_group_ranks(stage.group or dist.group.WORLD)),
    )
