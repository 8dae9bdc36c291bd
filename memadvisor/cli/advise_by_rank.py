"""What `memadvisor advise` says alike of plans with choices by rank: of pipelines, and of ranks that split layers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from memadvisor.cli.apply_command import NOT_WRITTEN, apply_command
from memadvisor.cli.compression import FLAGS
from memadvisor.cli.tables import printable
from memadvisor.errors import UsageError
from memadvisor.planning.pipelines import PipelineAdvice
from memadvisor.planning.tensor_parallel import TensorAdvice
from memadvisor.run.run import Run
from memadvisor.units import format_bytes

# Options of `advise` that such a plan has no use for.
OTHERS = (
    "gpus",
    "batch",
    "micro_batch",
    "policy",
    "near_ranks",
    "param_dtype",
    "reduce_dtype",
    "optimizer_dtype",
)


def others_given(arguments: argparse.Namespace, others: Sequence[str] = (*OTHERS, "hardware")) -> list[str]:
    """Options that are for other plans."""
    others = (*others, "optimizer_bits", "fused_updates", "chunked_loss", "autocast", "local_sgd", *FLAGS)
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name, None) is not None]
    return given + ["--learn"] * bool(arguments.learn)


def refuse_others(arguments: argparse.Namespace, what: str, others: Sequence[str]) -> None:
    """Raise UsageError for options that a plan with choices by rank has no use for."""
    if given := others_given(arguments, others):
        raise UsageError(
            f"The run is of {what}, and its plan says which units each rank recomputes or moves: {given[0]} is not for it.",
            hint="leave it out.",
        )


def print_ending(
    advice: PipelineAdvice | TensorAdvice, run: Run, console: Console, output: str | None
) -> None:
    """What to do with a plan of choices by rank, or with there being none."""
    if advice.plan is None:
        smallest = advice.smallest_budget_bytes
        console.print(
            printable(
                f"Nothing fits {format_bytes(advice.budget_bytes)} on all ranks. The smallest budget that would is "
                f"{format_bytes(smallest)} ({smallest} bytes)."
            )
        )
    elif output is not None:
        console.print(printable(f"The plan is written to {output}; apply it with"))
        console.print(printable("  " + apply_command(run, output, len(advice.ranks))), soft_wrap=True)
    else:
        console.print(NOT_WRITTEN)
