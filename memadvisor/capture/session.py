"""One process of a profiled run: which rank it is, where it writes, from the script's start to its end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memadvisor.capture.attach import when_torch_is_imported
from memadvisor.capture.children import Continuation, Followed, of_other_processes
from memadvisor.capture.script import Target, exit_code_of, hide_our_frames, run_target
from memadvisor.errors import MemadvisorError, UsageError
from memadvisor.run.frames import MAJOR, MINOR
from memadvisor.run.run import Manifest
from memadvisor.run.say import say
from memadvisor.run.store import discard_empty_run, write_manifest, write_refusal

if TYPE_CHECKING:
    from memadvisor.capture.recorder import Recorder

    WhenAttached = Callable[[Recorder | None], None]

# Recorders of this process that a fork takes along into its children.
_inherited: list[Recorder] = []


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Who this process is, by the variables that torchrun, our own launcher or Lightning's set.

    Lightning's sets no RANK: then `rank` is the local one, until the process group says otherwise.
    """

    rank: int
    world_size: int
    local_rank: int
    is_guess: bool


def rank_identity() -> RankIdentity:
    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    local_rank = number("LOCAL_RANK", 0)
    world_size = max(1, number("WORLD_SIZE", 1))
    return RankIdentity(number("RANK", local_rank), world_size, local_rank, "RANK" not in os.environ)


def start_manifest(directory: Path, target: Target, world_size: int, version: str, *, is_alone: bool) -> None:
    """Write what all ranks share; `version` is memadvisor's own. Raises OSError, and UsageError where nobody else may be
    writing into this directory (`is_alone`) and somebody is: both found it empty."""
    manifest = Manifest(
        format=(MAJOR, MINOR),
        memadvisor_version=version,
        created_unix_s=time.time(),
        world_size=world_size,
        script=target.name,
        arguments=target.arguments,
    )
    if not write_manifest(directory, manifest) and is_alone:
        raise UsageError(
            f"Another run has begun in {str(directory)!r} just now.", hint="name a new directory."
        )


def profile_script(
    target: Target,
    directory: Path,
    *,
    trace_step: int,
    memory_limit_bytes: int | None = None,
    max_bytes: int = 10**9,
    continuation: Continuation | None = None,
    when_attached: WhenAttached | None = None,
    after: Callable[[bool], None] | None = None,
    measure_engines: Callable[[], tuple[float, ...]] | None = None,
    why_not_shared_out: Callable[[Any], str | None] | None = None,
) -> None:
    """Run the script in this process and record it into `directory`.

    With a `continuation`, ranks that the script starts by itself are recorded too, and a script that executes itself anew
    goes on being recorded. `when_attached` is told of the recorder as soon as torch is there, or of None where recording
    could not start, also in the ranks that are followed, to which it is pickled; `after` runs once the script has ended,
    however it did, and is told whether it ended well. What the script raises is raised, with its own frames alone.
    """
    recorders: list[Recorder] = []
    has_torch = False
    options = {
        "directory": directory,
        "trace_step": trace_step,
        "memory_limit_bytes": memory_limit_bytes,
        "max_bytes": max_bytes,
        "measure_engines": measure_engines,
        "why_not_shared_out": why_not_shared_out,
        "sees_casts": when_attached is None,
    }
    followed = Followed(continuation, partial(_say_before_exec, recorders)) if continuation else None

    def attach() -> None:
        nonlocal has_torch
        has_torch = True
        _attach(recorders, options, when_attached)
        if followed is not None:
            followed.follow_spawn(partial(record_here, options=options, when_attached=when_attached))

    when_torch_is_imported(attach)
    started_by = os.getpid()
    failure: BaseException | None = None
    try:
        run_target(target)
    except BaseException as error:
        failure = error
        hide_our_frames(error)
        raise
    finally:
        if os.getpid() == started_by:  # a forked child that unwinds through here is the script's own
            if followed is not None:
                followed.stop()
            _finish(recorders, failure)
            if not recorders:
                if not has_torch:
                    _say_no_torch(failure)
                discard_empty_run(directory)
            elif after is not None:
                after(exit_code_of(failure) == 0)


def _say_no_torch(failure: BaseException | None) -> None:
    if not isinstance(failure, MemadvisorError):  # that says why itself
        elsewhere = of_other_processes()
        also = f"; {elsewhere}" if elsewhere else ""
        say(f"memadvisor: no training step was seen: the script never imported torch{also}.")


def _finish(
    recorders: Sequence[Recorder], failure: BaseException | None, *, is_optional: bool = False
) -> None:
    exception = None if failure is None or isinstance(failure, SystemExit) else type(failure).__name__
    for recorder in recorders:
        recorder.see_failure(failure)
        recorder.finish(exit_code_of(failure), exception)
        if is_optional and not recorder.has_seen_a_model:
            recorder.discard()


def _say_before_exec(recorders: Sequence[Recorder], command: Sequence[str], is_itself: bool) -> None:
    """Another program takes this process over, and Python does not end: it is now or never."""
    program = " ".join(command)[:200]
    if not is_itself:
        text = f"The script replaced its process by `{program}`, which is not recorded."
        say(f"memadvisor: {text}")
        for recorder in recorders:
            recorder.note("warning", text)
    for recorder in recorders:
        recorder.replaced(is_itself)


@contextlib.contextmanager
def record_here(index: int, options: dict[str, Any], when_attached: WhenAttached | None) -> Iterator[None]:
    """Record a process that torch.multiprocessing has started, as its `index`-th; `options` of the RecorderOptions.

    `when_attached` is told of its recorder, or of None where it has none. A forked one inherits its parent's
    recorder, which gives way. A process that calls no model leaves nothing behind: it is no rank of the training.
    """
    recorders: list[Recorder] = []
    while _inherited:
        _inherited.pop().leave_to_parent()
    _attach(recorders, options, when_attached, RankIdentity(index, 1, index, True))
    try:
        yield
    finally:
        failure = sys.exc_info()[1]
        # torch's `_wrap` ends so after an exception, once it has written that down.
        cause = failure.__context__ if isinstance(failure, SystemExit) else None
        _finish(recorders, cause or failure, is_optional=True)
        if when_attached is not None and isinstance(cause, MemadvisorError):
            write_refusal(options["directory"], cause.one_line())


def _attach(
    recorders: list[Recorder],
    options: dict[str, Any],
    when_attached: WhenAttached | None,
    identity: RankIdentity | None = None,
) -> None:
    identity = identity or rank_identity()
    recorder: Recorder | None = None
    try:
        from memadvisor.capture.recorder import Recorder
        from memadvisor.capture.writer import RecorderOptions

        recorder = Recorder(
            RecorderOptions(
                rank=identity.rank,
                world_size=identity.world_size,
                local_rank=identity.local_rank,
                rank_is_guess=identity.is_guess,
                **options,
            )
        )
    except Exception as error:
        say(f"memadvisor: recording could not start: {type(error).__name__}: {error}")
    if recorder is not None:
        recorders.append(recorder)
        _inherited.append(recorder)
    if when_attached is not None:
        when_attached(recorder)
