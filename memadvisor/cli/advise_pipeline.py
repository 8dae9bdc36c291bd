"""`memadvisor advise` on a recorded pipeline: what each rank recomputes, and moves, for a memory budget."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.cli.advise_by_rank import OTHERS, print_ending, refuse_others
from memadvisor.cli.printing import stdout_console
from memadvisor.cli.tables import printable
from memadvisor.hardware.load import load_hardware
from memadvisor.plan_file import save_plan
from memadvisor.planning.budget import budget_bytes
from memadvisor.planning.pipelines import PipelineAdvice, PipelinePoint, advise_pipeline
from memadvisor.run.run import Run
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import counted, format_bytes, format_seconds


def run_pipeline(arguments: argparse.Namespace, run: Run) -> int:
    """Exit code 0 where every rank fits, 1 where one does not; then nothing is written."""
    refuse_others(arguments, "a pipeline", OTHERS)
    hardware = None if arguments.hardware is None else load_hardware(arguments.hardware)
    advice = advise_pipeline(run, memory_bytes=budget_bytes(arguments.memory, run), hardware=hardware)
    if advice.plan is not None and arguments.output is not None:
        save_plan(advice.plan, Path(arguments.output))
    if arguments.json:
        print(json.dumps(pipeline_advice_to_json(advice), indent=1))
    else:
        _print(advice, run, stdout_console(), arguments.output)
    return 0 if advice.plan is not None else 1


def pipeline_advice_to_json(advice: PipelineAdvice) -> dict[str, Any]:
    """Keys as those of `advise`, with `pipeline` in place of `plans`."""
    return {
        "budget_bytes": advice.budget_bytes,
        "pipeline": {
            "schedule": advice.schedule,
            "num_pipelines": advice.num_pipelines,
            "num_stages": advice.num_stages,
            "num_micro_batches": advice.num_micro_batches,
            "fits": advice.plan is not None,
            "ranks": [dataclasses.asdict(rank) for rank in advice.ranks],
            "predicted_peak_bytes": max(rank.predicted_peak_bytes for rank in advice.ranks),
            "predicted_step_time_s": advice.step_time_s,
            "predicted_bubble_fraction": advice.bubble_fraction,
            "everything": _point_to_json(advice.everything),
        },
        "front": [_point_to_json(point) for point in advice.front],
        "smallest_budget_bytes": advice.smallest_budget_bytes,
        "measured": {"peak_bytes": advice.measured_peak_bytes, "step_time_s": advice.measured_step_time_s},
        "notes": list(advice.notes),
    }


def _point_to_json(point: PipelinePoint) -> dict[str, Any]:
    return {
        "predicted_peak_bytes": point.peak_bytes,
        "predicted_step_time_s": point.step_time_s,
        "num_recomputed": list(point.num_recomputed),
        "num_moved": list(point.num_moved),
    }


def _print(advice: PipelineAdvice, run: Run, console: Console, output: str | None) -> None:
    beside = (
        f"{advice.num_pipelines} pipelines beside each other" if advice.num_pipelines > 1 else "A pipeline"
    )
    console.print(
        Text(
            f"Budget {format_bytes(advice.budget_bytes)} a rank. {beside} of {advice.num_stages} stages on "
            f"{counted(len(advice.ranks), 'rank')}, {advice.schedule}, {counted(advice.num_micro_batches, 'micro-batch')}. Measured without a "
            f"plan: fullest rank {format_bytes(advice.measured_peak_bytes)}, step "
            f"{format_seconds(advice.measured_step_time_s)}. What is not called measured is predicted."
        )
    )
    console.print(_table(advice))
    for rank in advice.ranks:
        if rank.recomputed:
            console.print(printable(f"rank {rank.rank} recomputes {unit_ranges(rank.recomputed)}"))
        if rank.moved:
            words = f"rank {rank.rank} has activations of {unit_ranges(rank.moved)} on {rank.tier} meanwhile"
            console.print(printable(words))
    everything = advice.everything
    console.print(
        printable(
            f"A step takes {format_seconds(advice.step_time_s)}, of which ranks wait {100 * advice.bubble_fraction:.0f} % "
            f"in the mean. If every rank recomputed all that it can: {format_seconds(everything.step_time_s)}, fullest rank "
            f"{format_bytes(everything.peak_bytes)}."
        )
    )
    if len(advice.front) > 1:
        console.print(_front(advice))
    for note in advice.notes:
        console.print(printable(f"Note: {note}"))
    print_ending(advice, run, console, output)


def _table(advice: PipelineAdvice) -> Table:
    table = Table()
    headings = (
        "rank",
        "stages",
        "in\nflight",
        "peak,\nmeasured",
        "recomputed",
        "peak,\npredicted",
        "added",
        "fits",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "fits" else "right")
    for rank in advice.ranks:
        table.add_row(
            str(rank.rank),
            ", ".join(map(str, rank.stages)),
            str(rank.num_in_flight),
            format_bytes(rank.measured_peak_bytes),
            f"{len(rank.recomputed)} of {rank.num_units}",
            format_bytes(rank.predicted_peak_bytes),
            format_seconds(rank.added_s),
            "yes" if rank.fits else "no",
        )
    return table


def _front(advice: PipelineAdvice) -> Table:
    """Predicted peak of the fullest rank against predicted step."""
    table = Table(title="What memory buys", title_justify="left", title_style="")
    moves = any(any(point.num_moved) for point in advice.front)
    moved = ("on a tier\nby rank",) if moves else ()
    for heading in ("peak", "step time", "recomputed\nby rank", *moved, ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for point in advice.front:
        table.add_row(
            format_bytes(point.peak_bytes),
            format_seconds(point.step_time_s),
            ", ".join(map(str, point.num_recomputed)),
            *([", ".join(map(str, point.num_moved))] if moves else []),
            "within the budget" if point.peak_bytes <= advice.budget_bytes else "",
        )
    return table
