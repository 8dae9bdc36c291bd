"""Which directory a run goes to, agreed by all ranks without a word between them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from memadvisor.capture.script import Target
from memadvisor.errors import UsageError
from memadvisor.run.store import RUNS, create_run_directory, join_run_directory, unused_run_directory


def choose_directory(arguments: argparse.Namespace, target: Target) -> Path:
    """Make the run directory, or join the one that another rank of the same launch has made.

    The path is absolute: the script may change the working directory. Raises UsageError when it cannot be used.
    """
    launch = _launch_id()
    if arguments.nproc and launch:
        raise UsageError("--nproc was given inside a launcher's rank.", hint="leave the ranks to torchrun.")
    if arguments.joined or arguments.again:
        return Path(arguments.out)
    if launch is None:
        path = Path(arguments.out) if arguments.out else unused_run_directory(target.label)
        create_run_directory(path)
        return path.absolute()
    path = Path(arguments.out) if arguments.out else RUNS / f"{target.label}-{launch}"
    join_run_directory(path, launch)
    return path.absolute()


def _launch_id() -> str | None:
    """The same for all ranks of one launch, another for the next; None outside a launcher."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    run, port = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("MASTER_PORT", "0")
    several_nodes = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    parent = "" if several_nodes else f"-{os.getppid()}"
    return "".join(c if c.isalnum() or c == "-" else "_" for c in f"{run}-{port}{parent}")
