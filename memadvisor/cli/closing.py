"""The few lines that close a profiled run, on stderr: the script's stdout is its own."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from memadvisor.errors import MemadvisorError


def print_closing(directory: Path) -> None:
    """Say what was recorded and where. Never raises: the script's own end must not change."""
    try:
        from rich.console import Console

        from memadvisor.cli.show import print_summary
        from memadvisor.run.store import load_run

        console = Console(file=sys.__stderr__, stderr=True)
        print_summary(load_run(directory), console)
        where = shlex.quote(str(directory))
        console.print(
            f"more: memadvisor show {where} | memadvisor report {where} | memadvisor tui {where}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    except MemadvisorError as error:
        os.write(2, f"memadvisor: {error.one_line()}\n".encode(errors="replace"))
    except Exception as error:
        os.write(
            2,
            f"memadvisor: no summary ({type(error).__name__}: {error}); the run is in {directory}\n".encode(
                errors="replace"
            ),
        )
