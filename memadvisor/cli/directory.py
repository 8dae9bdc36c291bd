"""The run directory that a command was given, or finds."""

from __future__ import annotations

import argparse
from pathlib import Path

from memadvisor.capture.script import Target
from memadvisor.capture.session import rank_identity
from memadvisor.errors import UsageError
from memadvisor.run.launch import launch_id, take_run_directory


def choose_directory(arguments: argparse.Namespace, target: Target) -> Path:
    """Make the run directory, or join that of the other ranks. Raises UsageError when it cannot be used."""
    if arguments.nproc and launch_id():
        raise UsageError("--nproc was given inside a launcher's rank.", hint="leave the ranks to torchrun.")
    if arguments.joined or arguments.again:
        if arguments.out is None:  # the launcher gives both
            raise UsageError(
                "--joined and --again are for ranks that memadvisor starts itself.", hint="leave them out."
            )
        return Path(arguments.out)
    return take_run_directory(arguments.out, target.label, rank=rank_identity().rank)
