"""`memadvisor profile [--nproc N] [-o DIR] [--live] SCRIPT|-m MODULE [ARGS...]`, also under torchrun."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from memadvisor import __version__
from memadvisor.capture.children import Continuation
from memadvisor.capture.launch import end_with, launch_ranks
from memadvisor.capture.script import Target, check_target
from memadvisor.capture.session import profile_script, rank_identity, start_manifest
from memadvisor.cli.closing import print_closing
from memadvisor.cli.directory import choose_directory
from memadvisor.cli.measuring import measure_engines, why_not_shared_out
from memadvisor.errors import UsageError
from memadvisor.run.launch import launch_id
from memadvisor.run.run import DEFAULT_TRACE_STEP
from memadvisor.run.say import say
from memadvisor.units import parse_bytes

TAKES_SCRIPT = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "memadvisor profile [--nproc N] [-o DIR] [--live] [--trace-step K] [--memory-limit SIZE] [--max-run-size SIZE] SCRIPT|-m MODULE [ARGS...]"
    parser.epilog = "Options after the script are the script's own. Under torchrun: torchrun ... -m memadvisor profile ..."
    add_recording_options(parser)
    parser.add_argument(
        "--live", action="store_true", help="print how to watch the run from another terminal"
    )


def add_recording_options(parser: argparse.ArgumentParser) -> None:
    """The options that `profile` and `run` share."""
    parser.add_argument("--nproc", type=positive, metavar="N", help="start N ranks on this machine")
    parser.add_argument(
        "-o", "--out", metavar="DIR", help="the run directory to make (default: memadvisor-runs/...)"
    )
    parser.add_argument(
        "--trace-step",
        type=_step,
        default=DEFAULT_TRACE_STEP,
        metavar="K",
        help="trace the step with this index, from 0 on (default: %(default)s, after the warm-up)",
    )
    parser.add_argument(
        "--memory-limit",
        type=_size,
        metavar="SIZE",
        help="let the script run out of memory at SIZE, and record what held it (slower; docs/out-of-memory.md)",
    )
    parser.add_argument(
        "--max-run-size",
        type=_size,
        default=10**9,
        metavar="SIZE",
        help="most that a rank writes; beyond it only steps are recorded (default: 1 GB)",
    )
    # Of our own making: a rank that writes into a run there is, the launcher that started it, and a script that has
    # executed itself anew.
    parser.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.launcher is not None:
        end_with(arguments.launcher)
    target = target_of(arguments)
    directory = choose_directory(arguments, target)
    if arguments.live and rank_identity().rank == 0 and not arguments.joined:
        say(f"memadvisor: watch it with `memadvisor tui {shlex.quote(str(directory))}`")
    if arguments.nproc:
        return launch(arguments, target, directory, "profile", [])
    start(directory, target, rank_identity().world_size, is_alone=is_alone(arguments))
    here = Path.cwd()
    profile_script(
        target,
        directory,
        trace_step=arguments.trace_step,
        continuation=continuation_of(arguments, target, directory, "profile"),
        after=lambda well: close(arguments, directory, here=here, with_report=well),
        memory_limit_bytes=arguments.memory_limit,
        max_bytes=arguments.max_run_size,
        measure_engines=measure_engines,
        why_not_shared_out=why_not_shared_out,
    )
    return 0


def continuation_of(
    arguments: argparse.Namespace,
    target: Target,
    directory: Path,
    command: str,
    options: Sequence[str] = (),
    *,
    num_ranks: int | None = None,
) -> Continuation:
    """How the command goes on in other processes of the run; `options` are its own, `num_ranks` its plan's."""
    joined = ["--joined"] if arguments.joined else []
    words = [command, *joined, *_options_again(arguments, directory), *options]
    script = None if target.is_module else Path(target.name).resolve()
    return Continuation(target, script, tuple(words), num_ranks)


def _options_again(arguments: argparse.Namespace, directory: Path) -> list[str]:
    """Our options as another process of the same run gets them."""
    words = ["--out", str(directory), "--trace-step", str(arguments.trace_step)]
    words += ["--max-run-size", str(arguments.max_run_size)]
    return words + ([] if arguments.memory_limit is None else ["--memory-limit", str(arguments.memory_limit)])


def target_of(arguments: argparse.Namespace) -> Target:
    """The script that follows our options. Raises UsageError when there is none."""
    target: Target | None = arguments.target
    if target is None:
        raise UsageError(
            "No script is named.",
            hint=f"memadvisor {arguments.command} [OPTIONS] train.py, or -m package.module.",
        )
    check_target(target)
    return target


def start(directory: Path, target: Target, world_size: int, *, is_alone: bool) -> None:
    try:
        start_manifest(directory, target, world_size, __version__, is_alone=is_alone)
    except OSError as error:
        raise UsageError(
            f"{str(directory)!r} cannot be written: {error.strerror}.", hint="name another --out."
        ) from error


def is_alone(arguments: argparse.Namespace) -> bool:
    """Whether this process begins a run, and is none of several that were started together."""
    return launch_id() is None and not (arguments.joined or arguments.again)


def launch(
    arguments: argparse.Namespace, target: Target, directory: Path, command: str, options: list[str]
) -> int:
    """Start the ranks, wait for them, and close with the whole run's summary."""
    start(directory, target, arguments.nproc, is_alone=True)
    named = ["-m", target.name] if target.is_module else [target.name]
    own = [command, "--joined", *_options_again(arguments, directory), *options]
    code = launch_ranks(arguments.nproc, [*own, *named, *target.arguments])
    if directory.is_dir():
        print_closing(directory, here=Path.cwd(), with_report=code == 0)
    return code


def close(arguments: argparse.Namespace, directory: Path, *, here: Path, with_report: bool) -> None:
    """The closing summary, once a run: from rank 0, unless our own launcher prints it."""
    if not arguments.joined and rank_identity().rank == 0:
        print_closing(directory, here=here, with_report=with_report)


def positive(text: str) -> int:
    """A number of ranks on the command line."""
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) > 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.one_line().rstrip(".")) from error
