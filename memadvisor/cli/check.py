"""`memadvisor check RUN --max-peak SIZE --min-mfu X ...`: hold a run against limits (gates.py), for continuous integration.

Exit code 0: all hold. 1: one does not, is not recorded, or the record is not whole. 2: what was asked makes no sense, or
the run cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.analyzers.analysis import Analysis, analyze, run_to_json
from memadvisor.analyzers.conventions import CONVENTIONS
from memadvisor.analyzers.environment import differing_settings
from memadvisor.cli import summary
from memadvisor.cli.printing import print_json, print_plainly, stdout_console
from memadvisor.cli.show import choose_hardware
from memadvisor.cli.tables import NOT_RECORDED
from memadvisor.errors import UsageError
from memadvisor.gates import Gate, Judgement, Limits, judge, missing_from
from memadvisor.run.store import load_run
from memadvisor.tui.text import paragraph, words
from memadvisor.units import (
    format_bytes,
    format_fraction,
    format_seconds,
    parse_bytes,
    parse_duration,
    parse_fraction,
)

# Option, field of Limits, what reads it, metavar, help.
_OPTIONS = (
    ("--max-peak", "max_peak_bytes", parse_bytes, "SIZE", "most that a rank may have allocated at once, such as 24GiB"),
    ("--max-reserved", "max_reserved_bytes", parse_bytes, "SIZE", "most that a rank's allocator may hold of its GPU"),
    ("--min-mfu", "min_mfu", parse_fraction, "X", "least MFU of any rank: 0.4 or 40%%"),
    ("--min-hfu", "min_hfu", parse_fraction, "X", "least HFU of any rank"),
    ("--max-step-time", "max_step_time_s", parse_duration, "S", "longest median step of any rank: 0.25 or 250ms"),
    (
        "--max-exposed-communication", "max_exposed_communication", parse_fraction, "FRACTION",
        "largest share of the traced step in which a rank communicates and does not compute",
    ),
    ("--max-unexplained", "max_unexplained", parse_fraction, "FRACTION", "largest unexplained share of a peak"),
    (
        "--max-prediction-error", "max_prediction_error", parse_fraction, "FRACTION",
        "how far the applied plan's prediction of peak and step time may be off",
    ),
    ("--max-growth", "max_growth", parse_fraction, "FRACTION", "how much higher than the baseline's a peak may be"),
    ("--max-slowdown", "max_slowdown", parse_fraction, "FRACTION", "how much longer than the baseline's a step may be"),
)  # fmt: skip
_SINCE = ("max_growth", "max_slowdown")
_UTILIZATION = ("min_mfu", "min_hfu")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="directory that `memadvisor profile` wrote")
    parser.add_argument("--json", action="store_true", help="print the judgement as JSON (docs/json.md)")
    limits = parser.add_argument_group("limits", "held against the worst rank; what is not recorded fails")
    for option, name, _, metavar, purpose in _OPTIONS:
        limits.add_argument(option, dest=name, metavar=metavar, help=purpose)
    limits.add_argument(
        "--baseline", metavar="RUN", type=Path, help="the run that --max-growth and --max-slowdown start from"
    )
    limits.add_argument(
        "--convention", choices=CONVENTIONS, help="how the FLOPs behind --min-mfu are counted"
    )
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument(
        "--hardware", metavar="FILE|NAME", help="a device's name, or what `memadvisor calibrate` wrote"
    )
    hardware.add_argument(
        "--peak-tflops", metavar="X", help="the device's dense peak, 1e12 FLOP/s, in the dtype in use"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one line a limit to stdout."""
    limits = limits_of(arguments)
    analysis = _analyzed(arguments.run, arguments)
    baseline = None if arguments.baseline is None else _analyzed(arguments.baseline, arguments)
    found = judge(analysis, limits, baseline)
    if arguments.json:
        print_json(judgement_to_json(found, analysis, baseline))
    else:
        print_judgement(found, analysis, baseline, stdout_console())
    return 0 if found.holds else 1


def limits_of(arguments: argparse.Namespace) -> Limits:
    """What was asked. Raises UsageError for nothing, and for what makes no sense."""
    asked: dict[str, Any] = {
        name: parse(getattr(arguments, name))
        for _, name, parse, _, _ in _OPTIONS
        if getattr(arguments, name) is not None
    }
    if not asked:
        raise UsageError("Nothing was asked of the run.", hint="give a limit, such as --max-peak 24GiB.")
    for name in _UTILIZATION:
        if name in asked and not 0 < asked[name] <= 1:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(arguments, name)!r} is not above 0 and at most 1.",
                hint="write it as 0.4 or 40%.",
            )
    if arguments.baseline is None and not asked.keys().isdisjoint(_SINCE):
        raise UsageError(
            "--max-growth and --max-slowdown need a baseline.", hint="name a run: --baseline RUN."
        )
    if arguments.baseline is not None and asked.keys().isdisjoint(_SINCE):
        raise UsageError(
            "Nothing was asked of the baseline.", hint="add --max-growth 5% or --max-slowdown 5%."
        )
    if arguments.convention is not None and "min_mfu" not in asked:
        raise UsageError("--convention is that of --min-mfu, which was not given.", hint="add --min-mfu.")
    is_given = arguments.hardware is not None or arguments.peak_tflops is not None
    if is_given and asked.keys().isdisjoint(_UTILIZATION):
        raise UsageError(
            "The hardware's peak serves --min-mfu and --min-hfu alone, and neither was given.",
            hint="add one, or leave --hardware and --peak-tflops out.",
        )
    return Limits(**asked, convention=arguments.convention or CONVENTIONS[0])


def _analyzed(path: Path, arguments: argparse.Namespace) -> Analysis:
    recorded = load_run(path)
    return analyze(recorded, choose_hardware(recorded, arguments.hardware, arguments.peak_tflops))


def print_judgement(
    found: Judgement, analysis: Analysis, baseline: Analysis | None, console: Console
) -> None:
    """A line a gate; outside a terminal none is broken, so that logs can be searched by lines."""
    print_plainly(summary.header(analysis), console)
    if baseline is not None:
        for line in _baseline(baseline, analysis):
            print_plainly(line, console)
    for mark, line in (*map(gate_line, found.gates), *_record_lines(found)):
        if console.is_terminal:
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_row(mark, line)
            print_plainly(grid, console)
        else:
            whole = Text.assemble(mark, "  ", line)
            console.print(whole, markup=False, highlight=False, emoji=False, soft_wrap=True)
    broken = sum(not gate.holds for gate in found.gates)
    parts = [f"{broken} of {len(found.gates)} limits not held"] if broken else []
    parts += ["the record is not whole"] if found.missing else []
    verdict = ("all limits hold", "bold green") if found.holds else ("; ".join(parts), "bold red")
    print_plainly(paragraph(verdict), console)


def _baseline(baseline: Analysis, analysis: Analysis) -> Iterator[Text]:
    yield paragraph(("baseline ", "bold"), str(baseline.run.path), "  ", summary.ending(baseline))
    for reason in missing_from(baseline):
        yield paragraph(("warning ", "bold yellow"), f"the baseline's record is not whole: {reason}")
    settings = differing_settings(baseline.run, analysis.run)
    kinds = ", ".join(setting.label for setting in settings if setting.changes_kind)
    if kinds:
        yield paragraph(
            ("warning ", "bold yellow"), f"the baseline is of another kind: it differs in {kinds}"
        )


def gate_line(gate: Gate) -> tuple[Text, Text]:
    """`pass` and `peak at most 24.0 GiB: measured 20.1 GiB (rank 3, in backward of blocks.5)`."""
    limit, measured = _told_apart(gate)
    of_rank = "" if gate.rank is None else f"rank {gate.rank}"
    known = ", ".join(part for part in (of_rank, gate.where) if part)
    unknown = "; ".join(gate.unknown)
    if gate.measured is None:
        seen = f"{NOT_RECORDED} ({unknown})"
    else:
        seen = f"measured {measured}{f' ({known})' if known else ''}"
        seen += f"; {NOT_RECORDED} ({unknown})" if unknown else ""
    asked = f"{gate.figure} {'at most' if gate.is_maximum else 'at least'} {limit}"
    return _mark(gate.holds), paragraph(f"{asked}: {seen}")


def _record_lines(found: Judgement) -> Iterator[tuple[Text, Text]]:
    for reason in found.missing:
        yield _mark(False), paragraph(f"record whole: {reason}")
    if not found.missing:
        yield _mark(True), paragraph("record whole: every rank, to its end")


def _mark(holds: bool) -> Text:
    return words("pass", "bold green") if holds else words("FAIL", "bold red")


def _told_apart(gate: Gate) -> tuple[str, str]:
    """Limit and figure; in full where three digits would not show which is larger."""
    form = {"bytes": format_bytes, "seconds": format_seconds, "fraction": format_fraction}[gate.quantity]
    if gate.measured is None:
        return form(gate.limit), NOT_RECORDED
    limit, measured = form(gate.limit), form(gate.measured)
    if limit == measured and gate.limit != gate.measured:
        unit = {"bytes": " B", "seconds": " s", "fraction": ""}[gate.quantity]
        return f"{gate.limit!r}{unit}", f"{gate.measured!r}{unit}"
    return limit, measured


def judgement_to_json(found: Judgement, analysis: Analysis, baseline: Analysis | None) -> dict[str, Any]:
    """The stable JSON of `memadvisor check --json`, defined key by key in docs/json.md."""
    return {
        "format": 1,
        "run": run_to_json(analysis.run),
        "baseline": None if baseline is None else run_to_json(baseline.run),
        "holds": found.holds,
        "missing": list(found.missing),
        "missing_from_baseline": [] if baseline is None else list(missing_from(baseline)),
        "gates": [
            {
                "gate": gate.option,
                "figure": gate.figure,
                "quantity": gate.quantity,
                "asked": "at most" if gate.is_maximum else "at least",
                "limit": gate.limit,
                "measured": gate.measured,
                "rank": gate.rank,
                "kind": "measured",
                "holds": gate.holds,
                "where": gate.where,
                "unknown": list(gate.unknown),
            }
            for gate in found.gates
        ],
    }
