"""The few lines that close a profiled run, on stderr: the script's stdout is its own."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memadvisor.cli.patient_output import patient
from memadvisor.errors import MemadvisorError
from memadvisor.run.say import say

if TYPE_CHECKING:
    from memadvisor.analyzers.analysis import Analysis

_GRACE_S = 1.0


def print_closing(directory: Path, *, here: Path, with_report: bool) -> None:
    """Say what was recorded and where. Never raises: the script's own end must not change.

    `here` is where the user stands; the script may have changed the working directory.
    `with_report` writes the HTML report too; not after a failure, when nobody wants to wait for it.
    """
    try:
        from rich.console import Console

        from memadvisor.analyzers.analysis import analyze
        from memadvisor.cli.show import choose_hardware, print_summary
        from memadvisor.run.store import load_run

        file = io.StringIO() if sys.__stderr__ is None else patient(sys.__stderr__)[0]
        console = Console(file=file, stderr=True)
        run = load_run(directory)
        deadline_s = time.monotonic() + _GRACE_S
        while not run.is_finished and len(run.ranks) > 1 and time.monotonic() < deadline_s:
            time.sleep(0.1)  # other ranks of this launch are writing their last rows
            run = load_run(directory)
        analysis = analyze(run, choose_hardware(run, None, None))
        print_summary(analysis, console)
        _write_residuals(analysis)
        report = _write_report(analysis) if with_report else None
        where = shlex.quote(_seen_from(here, directory))
        first = _seen_from(here, report) if report else f"`memadvisor report {where}` writes it"
        say(
            f"report {first}\nmore   memadvisor show {where} | memadvisor tui {where}{_next(analysis, where)}"
        )
    except MemadvisorError as error:
        say(f"memadvisor: {error.one_line()}")
    except Exception as error:
        say(f"memadvisor: no summary ({type(error).__name__}: {error}); the run is in {directory}")


def _next(analysis: Analysis, where: str) -> str:
    """The command that goes on from here; plans are ranked from a run that has a traced step and no plan."""
    if analysis.run.plan is not None or analysis.largest_rank.peak is None:
        return ""
    return f"\nnext   memadvisor advise {where} --memory SIZE -o plan.json"


def _write_residuals(analysis: Analysis) -> None:
    """Keep what a plan's prediction was off by, part by part, beside the plan."""
    from memadvisor.analyzers.analysis import comparison_to_json
    from memadvisor.run.files import write_private_file

    if analysis.comparison is not None:
        value = {"format": 1, **comparison_to_json(analysis.comparison)}
        with contextlib.suppress(OSError):  # it says nothing that the run does not
            write_private_file(analysis.run.path / "residuals.json", json.dumps(value, indent=1) + "\n")


def _seen_from(here: Path, path: Path) -> str:
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _write_report(analysis: Analysis) -> Path | None:
    """The report's path; None where plotly is not installed."""
    from memadvisor.report.page import write_report

    path = analysis.run.path / "report.html"
    try:
        write_report(analysis, path)
    except ImportError:
        return None
    return path
