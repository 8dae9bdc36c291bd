"""`memadvisor report RUN`: write a run as one HTML file that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from memadvisor.analyzers.analysis import analyze
from memadvisor.cli.show import choose_hardware
from memadvisor.report.page import write_report
from memadvisor.run.store import load_run


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="directory that `memadvisor profile` wrote")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="the HTML file (default: RUN/report.html)"
    )
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument(
        "--hardware", metavar="FILE|NAME", help="a device's name, or what `memadvisor calibrate` wrote"
    )
    hardware.add_argument(
        "--peak-tflops", metavar="X", help="the device's dense peak, 1e12 FLOP/s, in the dtype in use"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and its path alone to stdout, for scripts."""
    recorded = load_run(arguments.run)
    analysis = analyze(recorded, choose_hardware(recorded, arguments.hardware, arguments.peak_tflops))
    path: Path = arguments.output or arguments.run / "report.html"
    write_report(analysis, path)
    print(path)
    return 0
