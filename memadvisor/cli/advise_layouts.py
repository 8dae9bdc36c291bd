"""`memadvisor advise RUN --gpus 8xH100,nodes=4`: layouts of accelerators for a captured model (docs/captured-layouts.md)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.cli.apply_command import NOT_WRITTEN, apply_command
from memadvisor.cli.estimate_view import layout_words
from memadvisor.cli.layout_rows import layouts_table, some_of
from memadvisor.cli.printing import stdout_console
from memadvisor.cli.tables import printable
from memadvisor.errors import UsageError
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.hardware.load import load_hardware
from memadvisor.plan_file import save_plan
from memadvisor.planning.advise_layouts import CapturedAdvice, advise_layouts, reason_of
from memadvisor.planning.captured_layouts import PricedCapture
from memadvisor.run.run import Run
from memadvisor.run.store import load_run
from memadvisor.units import counted, format_bytes, format_seconds, parse_bytes

# Options of `advise` that are of plans for the ranks that ran.
_OF_PLANS = (
    *("policy", "learn", "all_reduce_top", "all_reduce_rank", "local_sgd", "near_ranks"),
    *("fused_updates", "chunked_loss", "autocast"),
)


def run_layouts(arguments: argparse.Namespace) -> int:
    """Exit code 0 where a layout is likely enough to fit, 1 where none is."""
    _refuse_options_of_plans(arguments)
    run = load_run(arguments.path)
    advice = advise_layouts(
        run,
        parse_cluster(arguments.gpus),
        recorded_on=None if arguments.hardware is None else load_hardware(arguments.hardware),
        batch_samples=arguments.batch,
        memory_bytes=None if arguments.memory is None else parse_bytes(arguments.memory),
    )
    if arguments.output is not None and advice.found.best:
        if advice.plan is None:
            raise UsageError(
                "The best layouts are pipelines, which `memadvisor run --plan` does not make.",
                hint="leave -o out.",
            )
        save_plan(advice.plan, Path(arguments.output))
    if arguments.json:
        print(json.dumps(advice_to_json(advice), indent=1))
    else:
        _print(advice, run, stdout_console(), arguments.output)
    return 0 if advice.found.best else 1


def _refuse_options_of_plans(arguments: argparse.Namespace) -> None:
    lossy = [name for name in vars(arguments) if name.endswith(("_dtype", "_bits"))]
    for name in (*_OF_PLANS, *lossy):
        if getattr(arguments, name, None) not in (None, []):
            raise UsageError(
                f"--{name.replace('_', '-')} is for plans of ranks, and --gpus {arguments.gpus} asks for layouts.",
                hint="leave it out, or give --gpus a number.",
            )


def _print(advice: CapturedAdvice, run: Run, console: Console, output: str | None) -> None:
    found = advice.found
    for line in (_head(advice), _answer(advice)):
        console.print(printable(line), soft_wrap=True)
    if found.best:
        console.print(_table("fastest of each kind (predicted)", found.best))
        for number, one in enumerate(found.best, start=1):
            console.print(printable(f"{number}. {reason_of(advice, one)}"), soft_wrap=True)
    if len(found.front) > 1:
        console.print(_table("less memory for more time (predicted)", some_of(found.front)))
    console.print(
        Text(
            f"{counted(found.num_layouts, 'layout')}: {found.num_unsafe} too likely to run out of memory, {found.num_failed} impossible."
        ),
        soft_wrap=True,
    )
    for note in advice.notes:
        console.print(printable(f"Note: {note}"), soft_wrap=True)
    if advice.plan is None:
        return
    if output is None:
        console.print(NOT_WRITTEN)
    else:
        console.print(
            printable(f"The fastest layout without a pipeline is written to {output}; apply it with")
        )
        num_nodes = advice.question.target.cluster.num_nodes
        command = apply_command(run, output, advice.plan.num_ranks, num_nodes)
        console.print(printable("  " + command), soft_wrap=True)


def _head(advice: CapturedAdvice) -> str:
    model, target = advice.question.model, advice.question.target
    cluster = target.cluster
    times = "measured times" if target.roofs is None else "times scaled by roofline"
    return (
        f"Recorded on {model.device_name}: {counted(len(model.units), 'unit')}, {model.elements:,} parameters, micro-batch "
        f"{model.micro_batch_size}, step {format_seconds(model.step_time_s)} (measured). For {cluster.num_accelerators} x "
        f"{cluster.accelerator.name} ({times}), {counted(advice.question.batch_samples, 'sample')} a step:"
    )


def _answer(advice: CapturedAdvice) -> str:
    found, limit = advice.found, f"{advice.question.max_p_oom:.0%}"
    if not found.best:
        words = f"No layout keeps the chance of running out of memory below {limit}."
        if found.smallest is not None:
            words += (
                f" {capture_words(found.smallest)} needs least: {format_bytes(round(found.smallest.memory.total_bytes))} of"
                f" {format_bytes(advice.question.target.device.memory_bytes)}."
            )
        return words
    best = found.best[0]
    return (
        f"Fastest with less than {limit} chance of running out of memory: {capture_words(best)}; "
        f"{format_seconds(best.step_time_s)} a step predicted."
    )


def capture_words(one: PricedCapture) -> str:
    """As `estimate` names layouts, with the number of units that run again and those of each stage."""
    words = layout_words(dataclasses.replace(one.layout, recompute="none")).split(", ")
    if one.chosen.recomputed:
        words[-1] = f"{len(one.chosen.recomputed)} of {sum(one.chosen.stage_units)} units recomputed"
    if one.layout.pipeline > 1:
        words.append(f"stages of {'+'.join(map(str, one.chosen.stage_units))} units")
    return ", ".join(words)


def _table(title: str, layouts: tuple[PricedCapture, ...]) -> Table:
    return layouts_table(
        title,
        "a step",
        (
            (capture_words(one), format_seconds(one.step_time_s), one.mfu, one.memory.peak_bytes, one.p_oom)
            for one in layouts
        ),
    )


def advice_to_json(advice: CapturedAdvice) -> dict[str, Any]:
    """Keys are stable (docs/captured-layouts.md)."""
    question, found = advice.question, advice.found
    return {
        "format": 1,
        "kind": "predicted",
        "times": "measured" if question.target.roofs is None else "scaled by roofline",
        "num_accelerators": question.target.cluster.num_accelerators,
        "memory_bytes": question.target.device.memory_bytes,
        "batch_samples": question.batch_samples,
        "max_p_oom": question.max_p_oom,
        "measured": {"step_time_s": question.model.step_time_s, "device": question.model.device_name},
        "best": [{**_one_to_json(one), "why": reason_of(advice, one)} for one in found.best],
        "front": [_one_to_json(one) for one in found.front],
        "smallest": None if found.smallest is None else _one_to_json(found.smallest),
        "counts": {
            "num_layouts": found.num_layouts,
            "num_unsafe": found.num_unsafe,
            "num_failed": found.num_failed,
        },
        "notes": list(advice.notes),
    }


def _one_to_json(one: PricedCapture) -> dict[str, Any]:
    return {
        "layout": dataclasses.asdict(one.layout),
        "recomputed": sorted(one.chosen.recomputed),
        "stage_units": list(one.chosen.stage_units),
        "step_time_s": one.step_time_s,
        "time_s": dict(one.times.time_s),
        "peak_memory_bytes": round(one.memory.peak_bytes),
        "memory_bytes": {
            field.name.removesuffix("_bytes"): round(getattr(one.memory, field.name))
            for field in dataclasses.fields(one.memory)
        },
        "p_oom": one.p_oom,
        "mfu": one.mfu,
    }
