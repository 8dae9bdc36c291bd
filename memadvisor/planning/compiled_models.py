"""Models of which ZeRO stage 3 cannot free parameters: torch.compile has made a graph of them, or of modules inside."""

from __future__ import annotations

from memadvisor.cost.step import CapturedStep
from memadvisor.run.run import Run


def keeps_parameters(run: Run, step: CapturedStep) -> bool:
    """Whether `run` refuses stage 3. The script's own FSDP2 goes around what is compiled."""
    if step.shard_groups:
        return False
    rank = run.rank(step.rank)
    return no_unit_ran(step) or any(module.type_name == "OptimizedModule" for module in rank.modules)


def no_unit_ran(step: CapturedStep) -> bool:
    """Whether no unit of several was seen to run by itself: nothing says when its parameters are needed."""
    return len(step.states) > 1 and units_that_ran(step).isdisjoint(step.states)


def units_that_ran(step: CapturedStep) -> set[str | None]:
    return {segment.unit for segment in step.segments if segment.phase == "forward"}
