"""`memadvisor show RUN`: print what a run recorded, for people or (--json) for programs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType

from memadvisor.analyzers.analysis import Analysis, analysis_to_json, analyze
from memadvisor.analyzers.conventions import CONVENTIONS
from memadvisor.analyzers.first_changes import WORTH_NAMING
from memadvisor.analyzers.model_states import expected_text
from memadvisor.analyzers.utilization import compute_dtype
from memadvisor.cli import summary, summary_failures, summary_memory, summary_time
from memadvisor.cli.printing import (
    Labelled,
    print_json,
    print_plainly,
    print_sections,
    stdout_console,
)
from memadvisor.cli.tables import NOT_RECORDED
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.load import load_hardware, named_hardware
from memadvisor.report.data_waits import WORTH_CLOSING, wait_in_words
from memadvisor.report.next_steps import own_tensors, slow_parts
from memadvisor.report.view import RankView
from memadvisor.report.words import place_name
from memadvisor.run.run import Run
from memadvisor.run.store import load_run
from memadvisor.tui.text import paragraph
from memadvisor.units import format_bytes, format_fraction, format_seconds

_NUM_CHANGES = 3  # in the summary that closes a run


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="directory that `memadvisor profile` wrote")
    parser.add_argument("--json", action="store_true", help="print all results as JSON (docs/json.md)")
    parser.add_argument(
        "--convention",
        choices=CONVENTIONS,
        default=CONVENTIONS[0],
        help="how the FLOPs behind MFU are counted",
    )
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument(
        "--hardware", metavar="FILE|NAME", help="a device's name, or what `memadvisor calibrate` wrote"
    )
    hardware.add_argument(
        "--peak-tflops", metavar="X", help="the device's dense peak, 1e12 FLOP/s, in the dtype in use"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the run's analysis to stdout."""
    recorded = load_run(arguments.run)
    hardware = choose_hardware(recorded, arguments.hardware, arguments.peak_tflops)
    analysis = analyze(recorded, hardware)
    if arguments.json:
        print_json(analysis_to_json(analysis))
    else:
        print_analysis(analysis, stdout_console(), arguments.convention)
    return 0


def choose_hardware(recorded: Run, name: str | None, peak_tflops: str | None) -> Hardware | None:
    """What the user names or gives; else the data sheet of the very device that the run names; else nothing."""
    if peak_tflops is not None:
        return _given_hardware(recorded, peak_tflops)
    if name is not None:
        return load_hardware(name)
    return named_hardware(recorded.ranks[0].process.device_name)


def _given_hardware(recorded: Run, peak_tflops: str) -> Hardware:
    try:
        peak = float(peak_tflops) * 1e12
    except ValueError:
        peak = math.nan
    if not (math.isfinite(peak) and peak > 0):
        raise UsageError(
            f"--peak-tflops {peak_tflops!r} is not a positive number.",
            hint="write it as 989 for 989e12 FLOP/s.",
        )
    dtypes = {dtype for rank in recorded.ranks if (dtype := compute_dtype(rank)) is not None}
    return Hardware(
        name=recorded.ranks[0].process.device_name,
        kind="given",
        source="--peak-tflops",
        memory_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        peak_flops_per_s=dict.fromkeys(sorted(dtypes), peak),
    )


def print_analysis(analysis: Analysis, console: Console, convention: str = CONVENTIONS[0]) -> None:
    """The whole summary, section by section; `convention` is that of the MFU."""
    has_color = console.is_terminal and not console.no_color
    print_sections(
        summary.sections(analysis, console.width, has_color=has_color, convention=convention), console
    )


def print_summary(analysis: Analysis, console: Console) -> None:
    """The short form, about a dozen lines, with which `memadvisor profile` closes."""
    for line in _short_lines(analysis):
        print_plainly(line, console)


def _short_lines(analysis: Analysis) -> Iterator[RenderableType]:
    rank = analysis.largest_rank
    yield summary.header(analysis)
    yield from summary.trouble(analysis)
    yield from summary_failures.short(analysis)
    yield _short_peak(analysis)
    yield from summary.larger(analysis)
    for said in own_tensors(_of_largest(analysis)):
        yield _labelled("other", said)
    yield from _short_changes(analysis)
    states, kept, time = rank.model_states, rank.activations, rank.step_time
    if states is not None:
        yield _labelled(
            "states",
            f"{format_bytes(states.measured_bytes)} (theory {expected_text(states.theory_bytes)}); ",
            f"kept for the backward {NOT_RECORDED if kept is None else format_bytes(kept.saved_bytes)}",
            "" if kept is None else summary_time.moved_text(kept),
        )
    if time is None:
        yield _labelled("step", NOT_RECORDED)
    else:
        phases = " + ".join(f"{name} {format_seconds(spent)}" for name, spent in time.by_phase_s.items())
        yield _labelled(
            "step",
            f"{format_seconds(time.median_s)} = {phases}; {summary_time.throughput(analysis, rank)}",
            "" if time.unsteady is None else f"; {time.basis}",
        )
    yield from _short_waiting(analysis)
    used = rank.utilization
    if used.mfu is not None:
        yield _labelled(
            "utilization",
            f"MFU {format_fraction(used.mfu)}, HFU {format_fraction(used.hfu)} ({used.convention}, ",
            f"{used.hardware_name} {used.hardware_kind}, {used.dtype})",
        )
    traffic = rank.communication
    if traffic is not None and traffic.num_calls:
        yield _labelled(
            "traffic",
            f"{format_bytes(traffic.bytes)} a step, exposed {format_seconds(traffic.exposed_s)}, ",
            f"waiting {format_seconds(traffic.waiting_s)} (traced step)",
        )
    yield from _short_slow_parts(analysis)
    yield from _short_prediction(analysis)


def _short_changes(analysis: Analysis) -> Iterator[Labelled]:
    """The first few, of the rank whose peak is shown; after a plan the comparison stands in their place."""
    changes = analysis.first_changes(analysis.largest_rank)[:_NUM_CHANGES]
    if changes:
        yield _labelled("change", "what saves most, predicted, each by itself:")
    elif analysis.run.plan is None and analysis.largest_rank.peak is not None:
        yield _labelled(
            "change", f"none was found that saves {format_fraction(WORTH_NAMING)} of the peak or of a step"
        )
    for change in changes:
        yield _labelled("", (change.saved_in_words, "bold"), f": {change.in_words}")


def _short_waiting(analysis: Analysis) -> Iterator[Labelled]:
    """Of the rank that waits longest for its data, where that is much of a step: it holds up the others."""
    timed = [(rank, rank.step_time) for rank in analysis.ranks if rank.step_time is not None]
    longest = max(timed, key=lambda each: each[1].data_wait_s or 0.0, default=None)
    if longest is None or (longest[1].data_wait_fraction or 0.0) < WORTH_CLOSING:
        return
    said = wait_in_words(longest[1], longest[0].data_waits)
    of_rank = f" of rank {longest[0].rank}" if len(analysis.ranks) > 1 else ""
    if said is not None:
        yield _labelled("data", f"{said}{of_rank}")


def _short_slow_parts(analysis: Analysis) -> Iterator[Labelled]:
    """What the report names of a step's time, of the same rank; after a plan its comparison says more."""
    if analysis.run.plan is None:
        for said in slow_parts(_of_largest(analysis)):
            yield _labelled("slow", said)


def _of_largest(analysis: Analysis) -> RankView:
    rank = analysis.largest_rank
    return RankView(analysis, analysis.run.rank(rank.rank), rank, 0)


def _labelled(label: str, *pieces: str | tuple[str, str]) -> Labelled:
    return Labelled(label, paragraph(*pieces))


def _short_peak(analysis: Analysis) -> Labelled:
    rank = analysis.largest_rank
    if rank.peak is None:
        known = summary_memory.without_breakdown(rank, analysis.run.rank(rank.rank))
        return _labelled("peak", known)
    parts = summary_memory.peak_parts(rank.peak)
    largest = [
        part for part in sorted(parts, key=lambda part: -part[1]) if part[1] and part[0] != "unexplained"
    ]
    sizes = [size for _, size in largest]
    few = next(
        count for count in range(4, len(sizes) + 5) if sum(sizes[count:]) < min(sizes[:count], default=1)
    )
    if len(largest) > few + 1:  # the shares that are read here sum to the peak, and the rest is no large one
        largest[few:] = [("all else", sum(sizes[few:]))]
    shares = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest)
    of_rank = f", rank {rank.rank}" if len(analysis.ranks) > 1 else ""
    return _labelled(
        "peak",
        (format_bytes(rank.peak.allocated_bytes), "bold"),
        f" in {place_name(rank.peak.position)}{of_rank}: {shares}, ",
        f"unexplained {format_bytes(rank.peak.unexplained_bytes)}",
    )


def _short_prediction(analysis: Analysis) -> Iterator[RenderableType]:
    if analysis.comparison is not None:
        yield summary.prediction(analysis)
