"""`memadvisor advise` on a run whose ranks split layers, or whose parallelism is their own in another way: what all of them
recompute for a memory budget."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memadvisor.cli.advise_by_rank import OTHERS, print_ending, refuse_others
from memadvisor.cli.printing import stdout_console
from memadvisor.cli.summary_script import script_changes
from memadvisor.cli.tables import printable
from memadvisor.plan_file import save_plan
from memadvisor.planning.budget import budget_bytes
from memadvisor.planning.own_updates import own_updates
from memadvisor.planning.tensor_parallel import (
    TensorAdvice,
    TensorPoint,
    advise_tensor_parallel,
    own_sharding,
)
from memadvisor.run.run import Run
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import format_bytes, format_seconds


def run_tensor_parallel(arguments: argparse.Namespace, run: Run) -> int:
    """Exit code 0 where every rank fits, 1 where one does not; then nothing is written."""
    refuse_others(arguments, "ranks that split layers", (*OTHERS, "hardware"))
    advice = advise_tensor_parallel(run, memory_bytes=budget_bytes(arguments.memory, run))
    return _show(arguments, run, advice, "split the model's layers", "tensor_parallel")


def run_of_its_own(arguments: argparse.Namespace, run: Run) -> int:
    """The same of ranks that reduce gradients by themselves. Raises UsageError where they have different units."""
    advice = advise_tensor_parallel(run, memory_bytes=budget_bytes(arguments.memory, run))
    own, sharding = own_updates(run.ranks[0]), own_sharding(run)
    if sharding is not None:
        what = "shard their models by FSDP2"
        note = f"The script's own FSDP2 {sharding}: no plan sets what it frees and gathers then, and it stays as the script has it."
    elif own is None:
        what = "train without DistributedDataParallel and FSDP2"
        note = (
            "ZeRO, and all else that brings ranks together, is for scripts that wrap their model in DistributedDataParallel: "
            f"`--gpus {len(advice.ranks)}` says what it would give this one."
        )
    else:
        what = f"train with {own.what}"
        note = f"That stays as the script has it. For plans of ZeRO, and of all else that brings ranks together, {own.instead}."
    advice = dataclasses.replace(advice, notes=(*advice.notes, note))
    return _show(arguments, run, advice, what, "own_parallelism")


def _show(arguments: argparse.Namespace, run: Run, advice: TensorAdvice, what: str, key: str) -> int:
    if advice.plan is not None and arguments.output is not None:
        save_plan(advice.plan, Path(arguments.output))
    if arguments.json:
        print(json.dumps(tensor_advice_to_json(advice, key), indent=1))
    else:
        _print(advice, run, stdout_console(), arguments.output, what)
    return 0 if advice.plan is not None else 1


def tensor_advice_to_json(advice: TensorAdvice, key: str) -> dict[str, Any]:
    """Keys as those of `advise`, with `key` in place of `plans`, which are none for ranks whose parallelism is their own."""
    return {
        "budget_bytes": advice.budget_bytes,
        **({"plans": []} if key == "own_parallelism" else {}),
        key: {
            "fits": advice.plan is not None,
            "recomputed": list(advice.recomputed),
            "num_units": advice.num_units,
            "ranks": [dataclasses.asdict(rank) for rank in advice.ranks],
            "predicted_peak_bytes": advice.chosen.peak_bytes,
            "predicted_step_time_s": advice.chosen.step_time_s,
        },
        "front": [_point_to_json(point) for point in advice.front],
        "smallest_budget_bytes": advice.smallest_budget_bytes,
        "measured": {"peak_bytes": advice.measured_peak_bytes, "step_time_s": advice.measured_step_time_s},
        "script_changes": [dataclasses.asdict(change) for change in advice.script_changes],
        "notes": list(advice.notes),
    }


def _point_to_json(point: TensorPoint) -> dict[str, Any]:
    return {
        "predicted_peak_bytes": point.peak_bytes,
        "predicted_step_time_s": point.step_time_s,
        "num_recomputed": point.num_recomputed,
    }


def _print(advice: TensorAdvice, run: Run, console: Console, output: str | None, what: str) -> None:
    console.print(
        printable(
            f"Budget {format_bytes(advice.budget_bytes)} a rank. {len(advice.ranks)} ranks {what}, and "
            f"recompute alike. Measured without a plan: fullest rank {format_bytes(advice.measured_peak_bytes)}, step "
            f"{format_seconds(advice.measured_step_time_s)}. What is not called measured is predicted."
        )
    )
    table = Table()
    for heading in ("rank", "peak,\nmeasured", "peak,\npredicted"):
        table.add_column(heading, justify="right")
    for rank in advice.ranks:
        peaks = rank.measured_peak_bytes, rank.predicted_peak_bytes
        table.add_row(str(rank.rank), *map(format_bytes, peaks))
    console.print(table)
    console.print(
        printable(
            f"Every rank recomputes {unit_ranges(advice.recomputed) or 'nothing'} ({len(advice.recomputed)} of "
            f"{advice.num_units} units); a step takes {format_seconds(advice.chosen.step_time_s)}."
        )
    )
    if len(advice.front) > 1:
        console.print(_front(advice))
    if advice.script_changes:
        console.print(script_changes(advice.script_changes))
    for note in advice.notes:
        console.print(printable(f"Note: {note}"))
    print_ending(advice, run, console, output)


def _front(advice: TensorAdvice) -> Table:
    """Predicted peak of the fullest rank against predicted step."""
    table = Table(title="What memory buys", title_justify="left", title_style="")
    for heading in ("peak", "step time", "recomputed", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for point in advice.front:
        table.add_row(
            format_bytes(point.peak_bytes),
            format_seconds(point.step_time_s),
            str(point.num_recomputed),
            "within the budget" if point.peak_bytes <= advice.budget_bytes else "",
        )
    return table
