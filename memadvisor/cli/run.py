"""`memadvisor run --plan plan.json [--nproc N] SCRIPT [ARGS...]`: apply a plan, profile, compare.

Without --plan, `--zero`, `--policy`, `--update-in-backward` and the options of precision.py, compression.py and
offload.py make a plan by hand, worked out on the live model.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from memadvisor.capture.launch import end_with
from memadvisor.capture.script import Target
from memadvisor.capture.session import profile_script, rank_identity
from memadvisor.cli.activation_bits import FLAGS as ROUNDING_FLAGS
from memadvisor.cli.activation_bits import add_rounding_options, rounding_of
from memadvisor.cli.applying import Application, is_applied_to_nothing
from memadvisor.cli.compression import FLAGS, add_compression_options, compression_of, local_sgd_of
from memadvisor.cli.directory import choose_directory
from memadvisor.cli.offload import FLAGS as OFFLOAD_FLAGS
from memadvisor.cli.offload import add_offload_options, offload_of, with_disk_directory
from memadvisor.cli.precision import (
    add_autocast,
    add_chunked_loss,
    add_fused_updates,
    add_optimizer_bits,
    add_precision_options,
    precision_of,
)
from memadvisor.cli.profile import (
    add_recording_options,
    close,
    continuation_of,
    is_alone,
    launch,
    positive,
    start,
    target_of,
)
from memadvisor.errors import MemadvisorError, PlanError, UsageError
from memadvisor.plan import Plan
from memadvisor.plan_checks import check_plan
from memadvisor.plan_file import load_plan, save_plan
from memadvisor.policies import RECOMPUTING
from memadvisor.run.launch import launch_id
from memadvisor.run.say import say
from memadvisor.run.store import discard_empty_run, discard_run, journal_path, read_refusal
from memadvisor.units import counted

TAKES_SCRIPT = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "memadvisor run (--plan FILE | [OPTIONS OF A PLAN]) [--nproc N] [--out DIR] SCRIPT|-m MODULE [ARGS...]"
    parser.add_argument("--plan", metavar="FILE", help="a plan that `memadvisor advise -o` wrote")
    parser.add_argument(
        "--zero", type=int, choices=range(4), metavar="0-3", help="ZeRO stage of a plan made by hand"
    )
    parser.add_argument(
        "--policy",
        choices=("none", *RECOMPUTING),
        help="which blocks a plan made by hand recomputes",
    )
    add_precision_options(parser)
    add_autocast(parser)
    add_optimizer_bits(parser)
    add_fused_updates(parser)
    add_chunked_loss(parser)
    add_compression_options(parser)
    add_offload_options(parser)
    add_rounding_options(parser)
    parser.add_argument(
        "--secondary-ranks",
        type=int,
        metavar="N",
        help="with --zero 3: N ranks that follow each other share a second copy, which is gathered for the backward",
    )
    parser.add_argument(
        "--reduce-depth",
        type=positive,
        metavar="N",
        help="with ZeRO stages 2 and 3: reductions of N units may be under way at once (1)",
    )
    parser.add_argument(
        "--update-in-backward",
        action="store_true",
        default=None,
        help="with ZeRO stages 2 and 3: update each unit, and free its gradients, as soon as they are reduced",
    )
    parser.add_argument(
        "--update-by-unit",
        action="store_true",
        default=None,
        help="update units one after another: what an update of all together (foreach) allocates is of one unit then, and "
        "what stages 1 and 2 have updated, and what the next forward of stage 3 begins with, begins to be gathered under the "
        "updates of others",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="of a plan made by hand: the ranks that the script starts by itself (torch.multiprocessing.spawn)",
    )
    add_recording_options(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.launcher is not None:
        end_with(arguments.launcher)
    target = target_of(arguments)
    plan = _plan(arguments)
    _check_ranks(plan, arguments)
    _warn_of_one_rank(plan, arguments)
    directory = choose_directory(arguments, target)
    plan = with_disk_directory(plan, directory)
    save_plan(plan, directory / "plan.json", replace=False)
    if arguments.nproc:
        options = ["--plan", str(directory / "plan.json")]
        return launch(arguments, target, directory, "run", options)
    start(directory, target, rank_identity().world_size, is_alone=is_alone(arguments))
    _run_here(arguments, target, plan, directory)
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    of_plan = ("zero", "policy", "param_dtype", "reduce_dtype", "optimizer_dtype", "update_in_backward")
    flags = (
        *of_plan,
        "update_by_unit",
        "reduce_depth",
        "secondary_ranks",
        "optimizer_bits",
        "fused_updates",
        "chunked_loss",
        "autocast",
        "local_sgd",
        *FLAGS,
        *OFFLOAD_FLAGS,
        *ROUNDING_FLAGS,
    )
    given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(arguments, flag) is not None]
    if arguments.ranks is not None and (arguments.nproc or arguments.plan is not None):
        excluded = "--nproc" if arguments.nproc else "--plan"
        raise UsageError(f"{excluded} excludes --ranks.", hint="each says how many ranks there are.")
    if arguments.plan is not None:
        if given:
            raise UsageError(f"--plan excludes {given[0]}.", hint="give a plan, or make one by hand.")
        return load_plan(arguments.plan)
    if not given:
        raise UsageError(
            "There is no plan to apply.",
            hint="give --plan FILE, or options of a plan, such as --zero 2 or --policy every-layer.",
        )
    plan = Plan(
        num_ranks=arguments.nproc or arguments.ranks or rank_identity().world_size,
        zero_stage=_stage(arguments),
        policy=arguments.policy or "none",
        why="made by hand",
        overlap=True,
        gather_depth=1,
        reduce_depth=arguments.reduce_depth or 1,
        precision=precision_of(arguments),
        compression=compression_of(arguments),
        local_sgd=local_sgd_of(arguments),
        update_in_backward=bool(arguments.update_in_backward),
        update_by_unit=bool(arguments.update_by_unit),
        secondary_ranks=arguments.secondary_ranks,
        optimizer_bits=arguments.optimizer_bits,
        delayed_update=bool(arguments.delayed_update),
        fused_updates=bool(arguments.fused_updates),
        chunked_loss=arguments.chunked_loss,
        autocast=arguments.autocast,
        **offload_of(arguments),
        **rounding_of(arguments),
    )
    check_plan(plan, "This run")
    return plan


def _stage(arguments: argparse.Namespace) -> int:
    if arguments.zero is None and arguments.offload_parameters is not None:
        return 3  # what units lie elsewhere by
    return int(arguments.zero or 0)


def _check_ranks(plan: Plan, arguments: argparse.Namespace) -> None:
    """Raise PlanError where the plan is for other ranks than those of the launch.

    Without one the script may start its ranks itself; one that does not is refused by the engine, when it trains.
    """
    if launch_id() is None and not (arguments.nproc or arguments.joined):
        return
    num_ranks = arguments.nproc or rank_identity().world_size
    if plan.num_ranks != num_ranks:
        raise PlanError(
            f"The plan is for {counted(plan.num_ranks, 'rank')}, and this is a run of {num_ranks}.",
            hint=f"start it with --nproc {plan.num_ranks}, or advise again with --gpus {num_ranks}.",
        )


def _warn_of_one_rank(plan: Plan, arguments: argparse.Namespace) -> None:
    """Stages are the same among one; parameters that lie elsewhere between their uses go by stage 3, though."""
    if plan.num_ranks == 1 and arguments.zero and arguments.offload_parameters is None:
        say(
            f"memadvisor run: --zero {arguments.zero} has no effect: ZeRO shards among several ranks, and this is a run of "
            "one. Start more with --nproc N, or say with --ranks N how many the script starts itself."
        )


def _run_here(arguments: argparse.Namespace, target: Target, plan: Plan, directory: Path) -> None:
    here = Path.cwd()
    options = ("--plan", str(directory / "plan.json"))
    continuation = continuation_of(arguments, target, directory, "run", options, num_ranks=plan.num_ranks)

    def after(well: bool) -> None:
        # A refused plan is one line, said below: there is nothing to sum up.
        if read_refusal(directory) is None and not isinstance(sys.exc_info()[1], MemadvisorError):
            close(arguments, directory, here=here, with_report=well)
            if rank_identity().rank == 0 and is_applied_to_nothing(directory):
                say("memadvisor run: the plan was applied to nothing: no model was trained.")

    try:
        profile_script(
            target,
            directory,
            trace_step=arguments.trace_step,
            memory_limit_bytes=arguments.memory_limit,
            max_bytes=arguments.max_run_size,
            continuation=continuation,
            when_attached=Application(plan),
            after=after,
        )
    except MemadvisorError as error:
        # A plan that cannot be applied rightly is refused before the first step, in one line of rank 0.
        if rank_identity().rank == 0:
            say(f"memadvisor run: {error.one_line()}")
        with contextlib.suppress(OSError):
            journal_path(directory, rank_identity().rank).unlink()
        discard_empty_run(directory)
        raise SystemExit(2) from None
    finally:
        _heed_refusal(directory)


def _heed_refusal(directory: Path) -> None:
    """A rank that the script started has refused the plan: however the script took that, it is the end of the run."""
    line = read_refusal(directory)
    if line is not None:
        say(f"memadvisor run: {line}")
        discard_run(directory)
        raise SystemExit(2) from None
