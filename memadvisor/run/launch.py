"""Which directory a run goes to, agreed by all ranks of one launch without a word between them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from memadvisor.errors import UsageError
from memadvisor.run.store import (
    RUNS,
    create_run_directory,
    join_run_directory,
    journal_path,
    unused_run_directory,
)


def launch_id() -> str | None:
    """The same for all ranks of one launch, another for the next; None outside a launcher."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    run, port = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("MASTER_PORT", "0")
    several_nodes = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    parent = "" if several_nodes else f"-{os.getppid()}"
    return "".join(c if c.isalnum() or c == "-" else "_" for c in f"{run}-{port}{parent}")


def take_run_directory(out: str | Path | None, label: str, *, rank: int, argument: str = "--out") -> Path:
    """Make the run directory, or join the one that another rank of the same launch has made.

    `out` None: a new name under RUNS, after `label`. The path is absolute: the script may change the working
    directory. `argument`: what the caller names `out` by. Raises UsageError when it cannot be used.
    """
    launch = launch_id()
    if launch is None:
        path = Path(out) if out else unused_run_directory(label)
        create_run_directory(path, argument)
        return path.absolute()
    path = Path(out) if out else _unused_by(rank, f"{label}-{launch}")
    join_run_directory(path, launch, argument)
    if journal_path(path, rank).exists():
        raise UsageError(f"{argument} {str(path)!r} is not empty.", hint="name a new directory.")
    return path.absolute()


def _unused_by(rank: int, name: str) -> Path:
    """Ranks that record several runs in one launch count them alike."""
    paths = (RUNS / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in paths if not journal_path(path, rank).exists())
