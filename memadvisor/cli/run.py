"""`memadvisor run --plan plan.json [--nproc N] SCRIPT [ARGS...]`: apply a plan, profile, compare.

Without --plan, `--zero`, `--policy`, `--param-dtype` and `--reduce-dtype` make a plan by hand, worked out on the
live model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memadvisor.capture.script import Target
from memadvisor.capture.session import profile_script, rank_identity
from memadvisor.cli.directory import choose_directory
from memadvisor.cli.precision import add_precision_options, precision_of
from memadvisor.cli.profile import add_recording_options, close, launch, start, target_of
from memadvisor.errors import MemadvisorError, PlanError, UsageError
from memadvisor.plan import Plan, check_plan, load_plan, save_plan
from memadvisor.run.store import discard_empty_run, journal_path

if TYPE_CHECKING:
    from memadvisor.capture.recorder import Recorder

TAKES_SCRIPT = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "memadvisor run (--plan FILE | [--zero 0-3] [--policy NAME] [--param-dtype DTYPE] [--reduce-dtype DTYPE]) [--nproc N] [--out DIR] SCRIPT|-m MODULE [ARGS...]"
    parser.add_argument("--plan", metavar="FILE", help="a plan that `memadvisor advise -o` wrote")
    parser.add_argument(
        "--zero", type=int, choices=range(4), metavar="0-3", help="ZeRO stage of a plan made by hand"
    )
    parser.add_argument(
        "--policy",
        choices=("none", "every-layer", "sqrt"),
        help="which blocks a plan made by hand recomputes",
    )
    add_precision_options(parser)
    add_recording_options(parser)


def run(arguments: argparse.Namespace) -> int:
    target = target_of(arguments)
    plan = _plan(arguments)
    _check_ranks(plan, arguments)
    directory = choose_directory(arguments, target)
    save_plan(plan, directory / "plan.json", replace=False)
    if arguments.nproc:
        options = ["--plan", str(directory / "plan.json")]
        return launch(arguments, target, directory, "run", options)
    start(directory, target, rank_identity().world_size)
    _run_here(arguments, target, plan, directory)
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    flags = ("zero", "policy", "param_dtype", "reduce_dtype")
    given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(arguments, flag) is not None]
    if arguments.plan is not None:
        if given:
            raise UsageError(f"--plan excludes {given[0]}.", hint="give a plan, or make one by hand.")
        return load_plan(arguments.plan)
    if not given:
        raise UsageError("There is no plan to apply.", hint="give --plan FILE, or --zero and --policy.")
    plan = Plan(
        fingerprint=None,
        num_ranks=arguments.nproc or rank_identity().world_size,
        zero_stage=arguments.zero or 0,
        policy=arguments.policy or "none",
        units=(),
        micro_batch_size=None,
        grad_accum=None,
        prediction=None,
        budget_bytes=None,
        why="made by hand",
        overlap=True,
        gather_depth=1,
        precision=precision_of(arguments),
    )
    check_plan(plan, "This run")
    return plan


def _check_ranks(plan: Plan, arguments: argparse.Namespace) -> None:
    num_ranks = arguments.nproc or rank_identity().world_size
    if plan.num_ranks != num_ranks:
        raise PlanError(
            f"The plan is for {plan.num_ranks} ranks, and this is a run of {num_ranks}.",
            hint=f"start it with --nproc {plan.num_ranks}, or advise again with --gpus {num_ranks}.",
        )


def _check_batch(plan: Plan, num_samples: int, note: Callable[[str, str], None]) -> None:
    """A plan cannot set the script's own micro-batch; say so where the script has not been told."""
    if plan.micro_batch_size is not None and plan.micro_batch_size != num_samples:
        note(
            "warning",
            f"The plan's prediction is for micro-batches of {plan.micro_batch_size} samples, and the script's first "
            f"has {num_samples}: set the script's own micro-batch to {plan.micro_batch_size} and its gradient "
            f"accumulation to {plan.grad_accum}.",
        )


def _run_here(arguments: argparse.Namespace, target: Target, plan: Plan, directory: Path) -> None:
    here = Path.cwd()

    def attach(recorder: Recorder) -> None:
        from memadvisor.engines.apply import install

        def note(level: str, text: str) -> None:
            recorder.note(level, text)
            if rank_identity().rank == 0:
                os.write(2, f"memadvisor: {text}\n".encode(errors="replace"))

        recorder.on_first_batch = lambda num_samples: _check_batch(plan, num_samples, note)
        applied = install(plan, label=recorder.label, note=note)
        recorder.label_sources.append(applied.labelled_tensors)

    def after(well: bool) -> None:
        # A refused plan is one line, said below: there is nothing to sum up.
        if not isinstance(sys.exc_info()[1], MemadvisorError):
            close(arguments, directory, here=here, with_report=well)

    try:
        profile_script(
            target,
            directory,
            trace_step=arguments.trace_step,
            memory_limit_bytes=arguments.memory_limit,
            max_bytes=arguments.max_run_size,
            when_attached=attach,
            after=after,
        )
    except MemadvisorError as error:
        # A plan that cannot be applied rightly is refused before the first step, in one line of rank 0.
        if rank_identity().rank == 0:
            print(f"memadvisor run: {error.one_line()}", file=sys.stderr)
        journal_path(directory, rank_identity().rank).unlink(missing_ok=True)
        discard_empty_run(directory)
        raise SystemExit(2) from None
