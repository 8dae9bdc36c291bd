"""Up to which ZeRO stage `run` applies plans to the script, and why to none beyond."""

from __future__ import annotations

from collections.abc import Iterator

from memadvisor.analyzers.derivatives import differentiated_backwards
from memadvisor.analyzers.replaced_parameters import replaces_parameters
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.compiled_models import keeps_parameters
from memadvisor.run.run import Run

_REPLACED = (
    "What stages 1 to 3 take is not predicted here: the script gives parameters other memory in each step (p.data = ...), which "
    "they have beside the engine's then, and what it keeps for that is not shared among ranks."
)


def last_stage(run: Run, step: CapturedStep) -> int:
    """The script's own FSDP2 shards what it shards, with any optimizer."""
    if why_no_stages(run, step) is not None:
        return 0
    return 2 if keeps_parameters(run, step) or _is_differentiated(run, step) else 3


def why_no_stages(run: Run, step: CapturedStep) -> str | None:
    """Why no plan is of stages 1 to 3, in a sentence; None where some are."""
    if step.shard_groups:
        return None
    rank = run.rank(step.rank)
    if rank.process.whole_optimizer is not None:
        return rank.process.whole_optimizer
    return _REPLACED if replaces_parameters(rank) else None


def _is_differentiated(run: Run, step: CapturedStep) -> bool:
    """Whether the loss is made of a derivative, whose graph keeps parameters as long as it lives."""
    return bool(differentiated_backwards(run.rank(step.rank)))


def stage_notes(run: Run, step: CapturedStep, num_ranks: int) -> Iterator[str]:
    """Which stages no plan has."""
    if num_ranks == 1:
        return
    why = why_no_stages(run, step)
    if why == _REPLACED:
        yield f"No plan is of ZeRO stages 1 to 3. {why} `run --zero` applies them all the same."
    elif why is not None:
        yield f"{why.removesuffix('.')}: no plan is of these stages."
    elif keeps_parameters(run, step):
        yield (
            "No plan is of ZeRO stage 3: of what torch.compile has made, and of units that were not seen to run by themselves, "
            "`run` cannot free the parameters between their uses."
        )
    elif _is_differentiated(run, step):
        yield (
            "No plan is of ZeRO stage 3: the loss is made of a derivative (create_graph=True), whose graph keeps parameters that "
            "stage 3 would free."
        )
