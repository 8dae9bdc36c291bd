"""From a plan to another engine's configuration, by the engine's name."""

from __future__ import annotations

from collections.abc import Callable

from memadvisor.errors import PlanError, UsageError
from memadvisor.export.accelerate import to_accelerate
from memadvisor.export.deepspeed import to_deepspeed
from memadvisor.export.exported import Exported
from memadvisor.export.fsdp2 import to_fsdp2
from memadvisor.export.megatron import to_megatron
from memadvisor.export.torchtitan import to_torchtitan
from memadvisor.plan import Plan

TARGETS: dict[str, Callable[[Plan], Exported]] = {
    "deepspeed": to_deepspeed,
    "accelerate": to_accelerate,
    "fsdp2": to_fsdp2,
    "torchtitan": to_torchtitan,
    "megatron": to_megatron,
}


def export_plan(plan: Plan, target: str) -> Exported:
    """Raises UsageError for a target that is none, and PlanError for a plan that a target cannot be told."""
    write = TARGETS.get(target)
    if write is None:
        raise UsageError(f"{target!r} is no engine to export to.", hint=f"they are {', '.join(TARGETS)}.")
    if plan.ranks:
        raise PlanError(
            "The plan has choices by rank, for a pipeline or tensor parallelism, and no engine is told those.",
            hint="apply it with `memadvisor run --plan`.",
        )
    return write(plan)
