"""Models that torch.compile has made a graph of, or of modules inside: of which ZeRO stage 3 cannot free parameters, and of
which no plan can be applied."""

from __future__ import annotations

from memadvisor.analyzers.planned_models import models_of, planned_models
from memadvisor.cost.step import CapturedStep
from memadvisor.errors import UsageError
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


def check_calls_are_seen(run: Run, step: CapturedStep, num_ranks: int) -> None:
    """Raises UsageError for a model that the script has compiled in place, which `run` refuses: no hook of modules fires in
    its calls. Of one in DistributedDataParallel, or FSDP2, the call of that is seen. Where units ran, Dynamo has left it as it
    is, as it does classes of torch's own."""
    rank = run.rank(step.rank)
    if not rank.process.has_model_compiled_in_place or rank.process.has_ddp or step.shard_groups:
        return
    roots = {model.name for model in planned_models(rank, num_ranks)} or {*models_of(rank)}
    for module in rank.modules:
        if module.name in roots and module.is_own_forward and units_that_ran(step) <= {None, module.name}:
            raise UsageError(
                f"The script compiles {module.type_name} in place (model.compile()), and no plan can be applied to a model whose "
                "calls are not seen.",
                hint="compile it by model = torch.compile(model), and profile the script again.",
            )
