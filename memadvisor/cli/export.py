"""`memadvisor export PLAN --to TARGET [-o FILE]`: a plan as another engine's configuration (docs/export.md)."""

from __future__ import annotations

import argparse
import sys

from memadvisor.export.export import TARGETS, export_plan
from memadvisor.export.quoting import printable
from memadvisor.plan_file import load_plan
from memadvisor.run.files import write_output


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan that `memadvisor advise -o` wrote")
    parser.add_argument(
        "--to",
        required=True,
        metavar="TARGET",
        help=f"{', '.join(TARGETS)}: as JSON, YAML, a Python module, and arguments in a fragment of shell",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: stdout)")


def run(arguments: argparse.Namespace) -> int:
    """What the engine cannot be told is in the text as comments, or on stderr where the format has none."""
    exported = export_plan(load_plan(arguments.plan), arguments.to)
    if arguments.output is None:
        sys.stdout.write(exported.text)
    else:
        write_output(arguments.output, exported.text)
    if not exported.has_comments:
        for line in exported.remarks:
            print(f"memadvisor export: {printable(line)}", file=sys.stderr)
    elif exported.differences and arguments.output is not None:
        num = len(exported.differences)
        more = (
            ", of which some need more memory"
            if any(d.needs_more_memory for d in exported.differences)
            else ""
        )
        print(
            f"memadvisor export: {num} thing{'s' * (num > 1)} of the plan cannot be told to {arguments.to}{more}: see the "
            f"comments of {printable(arguments.output)}.",
            file=sys.stderr,
        )
    return 0
