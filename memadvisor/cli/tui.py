"""`memadvisor tui RUN`: look at a run in the terminal, finished or growing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memadvisor.errors import UsageError
from memadvisor.hardware.load import load_hardware
from memadvisor.run.store import check_run_directory


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="directory that `memadvisor profile` writes")
    parser.add_argument(
        "--hardware", metavar="NAME|FILE", help="whose peak FLOP/s utilization is measured against"
    )


def run(arguments: argparse.Namespace) -> int:
    """Open the terminal application. Without a terminal: UsageError, as Textual would print escapes."""
    check_run_directory(arguments.run)  # before the terminal is taken over
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError(
            "`memadvisor tui` needs a terminal, and this is none.",
            hint="use `memadvisor show RUN` or `memadvisor report RUN` here.",
        )
    hardware = load_hardware(arguments.hardware) if arguments.hardware is not None else None
    from memadvisor.tui.app import RunApp  # Textual: only where there is a terminal

    error = RunApp(arguments.run, hardware).run()
    if error is not None:
        raise error
    return 0
