"""`memadvisor doctor`: whether memadvisor works on this machine, tried out, and what stands in its way.

It prints with Python alone, and imports what may be missing only once it is known to be there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from memadvisor.cli.visible import visible
from memadvisor.doctor.findings import Finding, findings, trial_finding
from memadvisor.doctor.host import host_facts
from memadvisor.doctor.probe_torch import probe_torch
from memadvisor.run.files import working_directory


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit code 1 where there is a problem; a warning is none."
    parser.add_argument("--json", action="store_true", help="print the findings as JSON (docs/json.md)")


def run(arguments: argparse.Namespace) -> int:
    """Look, try, print as it comes. A problem is exit code 1."""
    found = []
    for finding in _look():
        found.append(finding)
        if not arguments.json:
            print("\n".join(_lines(finding, shutil.get_terminal_size((110, 24)).columns)), flush=True)
    if arguments.json:
        print(json.dumps({"format": 1, "findings": [asdict(finding) for finding in found]}, indent=1))
    return int(any(finding.state == "problem" for finding in found))


def _look() -> Iterator[Finding]:
    host, torch = host_facts(working_directory()), probe_torch()
    yield from findings(host, torch)
    if isinstance(torch, str) or None in host.package_versions.values():
        return
    from memadvisor.doctor.trials import run_trials  # needs numpy

    yield from map(trial_finding, run_trials(torch))


def _lines(finding: Finding, width: int) -> Iterator[str]:
    """Three columns; the hint under the text."""
    margin = " " * 24
    head = f"{finding.state:<8} {finding.subject:<14} "
    yield from textwrap.wrap(visible(finding.text), width, initial_indent=head, subsequent_indent=margin)
    if finding.hint is not None:
        hint = visible(finding.hint)
        yield from textwrap.wrap(hint, width, initial_indent=f"{margin}-> ", subsequent_indent=f"{margin}   ")
