"""One process of a profiled run: which rank it is, where it writes, from the script's start to its end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memadvisor.capture.attach import when_torch_is_imported
from memadvisor.capture.script import Target, exit_code_of, hide_our_frames, run_target
from memadvisor.run.frames import MAJOR, MINOR
from memadvisor.run.run import Manifest
from memadvisor.run.store import discard_empty_run, write_manifest

if TYPE_CHECKING:
    from memadvisor.capture.recorder import Recorder


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Who this process is, by the variables that torchrun and our own launcher set."""

    rank: int
    world_size: int
    local_rank: int


def rank_identity() -> RankIdentity:
    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    return RankIdentity(number("RANK", 0), max(1, number("WORLD_SIZE", 1)), number("LOCAL_RANK", 0))


def start_manifest(directory: Path, target: Target, world_size: int, version: str) -> None:
    """Write what all ranks share; `version` is memadvisor's own. Raises OSError."""
    manifest = Manifest(
        format=(MAJOR, MINOR),
        memadvisor_version=version,
        created_unix_s=time.time(),
        world_size=world_size,
        script=target.name,
        arguments=target.arguments,
    )
    write_manifest(directory, manifest)


def profile_script(
    target: Target,
    directory: Path,
    *,
    trace_step: int,
    memory_limit_bytes: int | None = None,
    max_bytes: int = 10**9,
    when_attached: Callable[[Recorder], None] | None = None,
    after: Callable[[bool], None] | None = None,
) -> None:
    """Run the script in this process and record it into `directory`.

    `when_attached` is told of the recorder as soon as torch is there; `after` runs once the script has
    ended, however it did, and is told whether it ended well. What the script raises is raised, with a traceback of its own frames alone.
    """
    recorders: list[Recorder] = []
    options = {
        "directory": directory,
        "trace_step": trace_step,
        "memory_limit_bytes": memory_limit_bytes,
        "max_bytes": max_bytes,
    }
    when_torch_is_imported(lambda: _attach(recorders, options, when_attached))
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
            exception = None if failure is None or isinstance(failure, SystemExit) else type(failure).__name__
            for recorder in recorders:
                recorder.see_failure(failure)
                recorder.finish(exit_code_of(failure), exception)
            if not recorders:
                _say("no training step was seen: the script never imported torch.")
                discard_empty_run(directory)
            elif after is not None:
                after(exit_code_of(failure) == 0)


def _attach(
    recorders: list[Recorder],
    options: dict[str, Any],
    when_attached: Callable[[Recorder], None] | None,
) -> None:
    from memadvisor.capture.recorder import Recorder
    from memadvisor.capture.writer import RecorderOptions

    identity = rank_identity()
    try:
        recorder = Recorder(
            RecorderOptions(
                rank=identity.rank,
                world_size=identity.world_size,
                local_rank=identity.local_rank,
                **options,
            )
        )
    except Exception as error:
        _say(f"recording could not start: {type(error).__name__}: {error}")
        return
    recorders.append(recorder)
    if when_attached is not None:
        when_attached(recorder)


def _say(text: str) -> None:
    # Not print(): the script may have replaced it, or sys.stderr.
    os.write(2, f"memadvisor: {text}\n".encode(errors="replace"))


def is_under_a_launcher() -> bool:
    """Whether torchrun (or our own launcher) has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "torch" not in sys.modules
