"""`memadvisor estimate --largest`: one line for each technique, or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.cli.model_words import part_lines
from memadvisor.cost.layouts.estimate import SAFE_P_OOM
from memadvisor.planning.largest import LargestAnswer, LargestFit, LargestQuestion
from memadvisor.units import format_count

_ASKED = {
    "micro-batch": "Largest micro-batch, in sequences of {seq} tokens",
    "sequence": "Longest sequence, in tokens, with a micro-batch of {size}",
    "model": "Largest relative of the model, with a micro-batch of {size} x {seq} tokens",
}


def print_largest(question: LargestQuestion, answers: Sequence[LargestAnswer], console: Console) -> None:
    """Predicted, all of it. Techniques stand once, with and without recomputation beside each other."""
    cluster = question.cluster
    target = "" if question.target_len is None else f" + {question.target_len}"
    asked = _ASKED[question.quantity].format(
        seq=f"{question.seq_len}{target}", size=question.micro_batch_size
    )
    console.print(
        Text(
            f"{asked}, that has less than {SAFE_P_OOM:.0%} chance of running out of memory (predicted):"
            f" {question.model.name}, {cluster.num_accelerators} x {cluster.accelerator.name},"
            f" {question.software.compute_dtype}, {question.software.name} code."
        ),
        soft_wrap=True,
    )
    for line in part_lines(question.model):
        console.print(Text(line), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("each technique alone")
    for name in (question.quantity, "tokens/s", "all recomputed", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, group in groupby(answers, key=lambda answer: answer.technique.name):
        table.add_row(Text(name), *(cell for answer in group for cell in _cells(question, answer.fit)))
    console.print(table)
    for line in _notes(question, answers):
        console.print(Text(line), soft_wrap=True)


def _cells(question: LargestQuestion, fit: LargestFit | None) -> tuple[str, str]:
    if fit is None:
        return "none fits", ""
    rate = format_count(fit.tokens_per_s)
    value = str(fit.value)
    if question.quantity == "model":
        value = f"{format_count(fit.model.num_parameters())} ({fit.value} x {fit.model.hidden})"
    return value + {"memory": "", "positions": " (p)", "searched": " (+)"}[fit.limited_by], rate


def _notes(question: LargestQuestion, answers: Sequence[LargestAnswer]) -> list[str]:
    fits = [answer.fit for answer in answers if answer.fit is not None]
    limits = {fit.limited_by for fit in fits}
    notes = []
    if question.quantity == "model":
        notes.append(
            "(layers x hidden): widths grow as the number of layers does; heads and vocabulary stay."
        )
    if "positions" in limits:
        notes.append("(p): the model's learned table of positions ends here, not the memory.")
    if "searched" in limits:
        notes.append("(+): larger ones were not searched.")
    return notes


def largest_to_json(question: LargestQuestion, answers: Sequence[LargestAnswer]) -> dict[str, Any]:
    """Keys are stable (docs/largest.md)."""
    model, cluster = question.model, question.cluster
    return {
        "format": 1,
        "kind": "predicted",
        "largest": question.quantity,
        "model": {"name": model.name, "num_params": model.num_parameters()},
        "accelerator": cluster.accelerator.name,
        "num_accelerators": cluster.num_accelerators,
        "seq_len": None if question.quantity == "sequence" else question.seq_len,
        "micro_batch_size": None if question.quantity == "micro-batch" else question.micro_batch_size,
        "software": dataclasses.asdict(question.software),
        "max_p_oom": SAFE_P_OOM,
        "techniques": [
            {
                "technique": answer.technique.name,
                "recompute": answer.technique.layout.recompute,
                "fit": None if answer.fit is None else _fit_to_json(answer.fit),
            }
            for answer in answers
        ],
    }


def _fit_to_json(fit: LargestFit) -> dict[str, Any]:
    model, estimate = fit.model, fit.estimate
    return {
        "value": fit.value,
        "unit": fit.unit,
        "limited_by": fit.limited_by,
        "layout": dataclasses.asdict(fit.step.layout),
        "seq_len": fit.step.seq_len,
        "model": {
            "n_layers": model.n_layers,
            "hidden": model.hidden,
            "head_dim": model.head_dim,
            "ffn": model.ffn,
            "num_params": model.num_parameters(),
        },
        "step_time_s": estimate.step_time_s,
        "tokens_per_s": fit.tokens_per_s,
        "total_memory_bytes": round(estimate.worst.total_bytes),
        "p_oom": estimate.p_oom,
    }
