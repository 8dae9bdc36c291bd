"""`memadvisor estimate --table`: one predicted row for each row of a CSV file of layouts (docs/layout-table.md)."""

from __future__ import annotations

import argparse
import csv
import io
import sys

from memadvisor.cli.estimate_view import COMPONENTS
from memadvisor.layout_table.read import read_layout_table
from memadvisor.planning.predict_layouts import RowPrediction, predict_row
from memadvisor.run.files import write_output

ANSWERS = ("step_time_s", "peak_memory_bytes", "fits", "p_oom", "mfu", "hfu")

# Options that describe what the columns of a table do.
_OF_COLUMNS = (
    "model", "gpus", "cluster", "seq", "target", "batch", "dp", "tp", "tp_kind", "tp_depth", "pp", "cp", "ep", "expert_imbalance",
    "zero", "shard", "micro_batch", "recompute", "recompute_layers", "schedule", "chunks", "split", "sequence_parallel",
    "context_kind", "offload_optimizer", "offload_parameters", "offload_activations", "framework", "precision", "attention",
    "model_code", "optimizer", "optimizer_in_backward", "sample_len", "lora_rank", "lora_targets", "lora_dropout",
    "lora_embeddings", "quantized_base", "memory", "show_schedule", "json",
)  # fmt: skip
_NOT_GIVEN = (None, False, "none", "ring")


def say_unused(arguments: argparse.Namespace) -> None:
    """Options that have no effect on a table."""
    given = [name for name in _OF_COLUMNS if getattr(arguments, name) not in _NOT_GIVEN]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        print(
            f"memadvisor estimate: no effect with --table, whose columns describe each row: {options}",
            file=sys.stderr,
        )


def predict_table(path: str, output: str) -> None:
    """Read, predict, write whole or not at all. Raises UsageError where a file cannot be read or written."""
    table = read_layout_table(path)
    predictions = [predict_row(row) for row in table.rows]
    write_output(output, table_text(predictions), hint="name a file in a writable directory.")
    failed = sum(each.prediction is None for each in predictions)
    rows = f"{len(predictions)} row{'s' * (len(predictions) != 1)}"
    what = f", {failed} of them with an error" if failed else ""
    print(f"memadvisor estimate: {rows}{what}, written to {output}", file=sys.stderr)
    if table.unread:
        names = ", ".join(repr(name) for name in table.unread)
        print(
            f"memadvisor estimate: not read, for they are no columns of layouts (docs/layout-table.md): {names}",
            file=sys.stderr,
        )


def table_text(predictions: list[RowPrediction]) -> str:
    """CSV: the answers, then times and memory of the worst stage by component, then note and error."""
    times: dict[str, None] = {}
    for each in predictions:
        if each.prediction is not None:
            times.update(dict.fromkeys(each.prediction.estimate.time_s))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    memory = tuple(f"memory_{component}" for component in COMPONENTS)
    writer.writerow((*ANSWERS, *(f"time_{name}_s" for name in times), *memory, "note", "error"))
    for each in predictions:
        writer.writerow((*_numbers(each, tuple(times)), "; ".join(each.notes), each.error or ""))
    return text.getvalue()


def _numbers(row: RowPrediction, times: tuple[str, ...]) -> list[str]:
    if row.prediction is None:
        return [""] * (len(ANSWERS) + len(times) + len(COMPONENTS))
    estimate = row.prediction.estimate
    return [
        f"{estimate.step_time_s:.6g}",
        f"{estimate.peak_memory_bytes:.0f}",
        "true" if estimate.fits else "false",
        f"{estimate.p_oom:.4g}",
        f"{estimate.mfu:.4g}",
        f"{estimate.hfu:.4g}",
        *(f"{estimate.time_s.get(name, 0.0):.6g}" for name in times),
        *(f"{getattr(estimate.worst, component):.0f}" for component in COMPONENTS),
    ]
