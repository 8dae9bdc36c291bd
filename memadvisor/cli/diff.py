"""`memadvisor diff RUN RUN`: what changed from one run to another, for people, for programs (--json) or as a page (-o)."""

from __future__ import annotations

import argparse
from pathlib import Path

from memadvisor.analyzers.analysis import Analysis, analyze
from memadvisor.analyzers.run_difference import run_difference
from memadvisor.cli.diff_json import difference_to_json
from memadvisor.cli.diff_sections import sections
from memadvisor.cli.printing import print_json, print_sections, stdout_console
from memadvisor.cli.show import choose_hardware
from memadvisor.report.difference_page import write_difference
from memadvisor.run.store import load_run


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="RUN", type=Path, help="directory that `memadvisor profile` wrote")
    parser.add_argument("after", metavar="RUN", type=Path, help="another one, which is compared with it")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print all differences as JSON (docs/json.md)")
    shape.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write both side by side as one HTML file, and print its path",
    )
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument(
        "--hardware",
        metavar="FILE|NAME",
        help="both runs' device by name, or what `memadvisor calibrate` wrote",
    )
    hardware.add_argument(
        "--peak-tflops", metavar="X", help="both runs' dense peak, 1e12 FLOP/s, in the dtype in use"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the differences to stdout. Exit code 0 whether there are any or not: `memadvisor check` has limits."""
    found = run_difference(_analyzed(arguments.before, arguments), _analyzed(arguments.after, arguments))
    if arguments.output is not None:
        write_difference(found, arguments.output)
        print(arguments.output)
    elif arguments.json:
        print_json(difference_to_json(found))
    else:
        console = stdout_console()
        print_sections(sections(found, console.width), console)
    return 0


def _analyzed(path: Path, arguments: argparse.Namespace) -> Analysis:
    recorded = load_run(path)
    return analyze(recorded, choose_hardware(recorded, arguments.hardware, arguments.peak_tflops))
