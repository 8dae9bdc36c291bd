"""`memadvisor estimate` without a layout: all layouts are searched, the best few and the front are shown."""

from __future__ import annotations

from math import gcd
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.cli.estimate_view import layout_words
from memadvisor.cli.layout_rows import layouts_table, some_of
from memadvisor.cli.model_words import (
    adapter_words,
    batch_words,
    cluster_words,
    length_words,
    pack_words,
    part_lines,
    size_words,
)
from memadvisor.layout import Layout
from memadvisor.planning.layout_reasons import Neighbour, Reason, reason_words
from memadvisor.planning.layout_space import LayoutQuestion
from memadvisor.planning.layouts import FoundLayouts, SearchCounts
from memadvisor.planning.nearest_fit import NearestFit
from memadvisor.planning.priced_layouts import Priced
from memadvisor.units import counted, format_bytes


def print_found(
    question: LayoutQuestion, found: FoundLayouts, reasons: tuple[Reason, ...], console: Console
) -> None:
    """Predicted, all of it. `reasons`: of the best, in their order."""
    for line in _question_lines(question) + _parting_words(question):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(_answer(question, found)), soft_wrap=True)
    if (
        found.best and question.cluster.num_accelerators > 1
    ):  # else there is one split, and the front begins with it
        console.print(
            _table(
                "fastest splits over ranks, near-equals left out (predicted; MFU with causal attention in full)",
                found.best,
            )
        )
    if found.best:
        console.print(Text("why (predicted; each change alone, replicas make up for degrees)"))
        for number, reason in enumerate(reasons, start=1):
            console.print(Text(f"{number}. {reason_words(reason)}"), soft_wrap=True)
    if len(found.front) > 1:
        console.print(_table("less memory for more time (predicted)", some_of(found.front)))
    console.print(Text(_counts_words(found.counts)), soft_wrap=True)


def _question_lines(question: LayoutQuestion) -> list[str]:
    model = question.model
    length = length_words(question.seq_len, question.target_len)
    return [
        f"model      {size_words(model)}; {length} x {batch_words(question.batch_sequences)} a step",
        f"cluster    {cluster_words(question.cluster)}",
        *part_lines(model),
        f"code       {question.software.name}, {question.software.compute_dtype}{pack_words(question.software)}",
        *adapter_words(model, question.software.lora),
    ]


def print_nearest(question: LayoutQuestion, nearest: NearestFit, console: Console) -> None:
    """Where nothing is safe."""
    console.print(Text(nearest_words(question, nearest)), soft_wrap=True)


def nearest_words(question: LayoutQuestion, nearest: NearestFit) -> str:
    """One line."""
    estimate, memory_bytes = nearest.smallest.estimate, nearest.smallest.estimate.memory_bytes
    missing_bytes = nearest.safe_memory_bytes - memory_bytes
    words = (
        f"Least memory: {layout_words(nearest.smallest.layout)}; {format_bytes(round(nearest.total_bytes))} of"
        f" {format_bytes(memory_bytes)}, p(OOM) {estimate.p_oom:.0%}. It is safe with"
        f" {format_bytes(nearest.safe_memory_bytes)} an accelerator, {format_bytes(missing_bytes)} more"
    )
    if nearest.larger is not None:
        words += f"; on {nearest.num_accelerators} accelerators some layout is ({layout_words(nearest.larger.layout)})"
    words += "."
    if not nearest.may_offload:
        words += " The optimizer on the host was not searched: the link to the host is not known ([host] in a cluster file)."
    lora = question.software.lora
    if lora is not None and not lora.is_quantized:
        words += (
            " --quantized-base nf4 holds the frozen matrices of layers in about a quarter of their bytes."
        )
    return f"{words} A shorter --seq takes less too."


def nearest_to_json(nearest: NearestFit) -> dict[str, Any]:
    """Keys are stable (docs/layouts.md)."""
    return {
        "smallest": priced_to_json(nearest.smallest),
        "total_bytes": round(nearest.total_bytes),
        "safe_memory_bytes": nearest.safe_memory_bytes,
        "num_accelerators": nearest.num_accelerators,
        "larger": None if nearest.larger is None else priced_to_json(nearest.larger),
        "may_offload": nearest.may_offload,
    }


def _answer(question: LayoutQuestion, found: FoundLayouts) -> str:
    limit = f"{question.max_p_oom:.0%}"
    if not found.best:
        return (
            f"No layout of {question.cluster.num_accelerators} {question.cluster.accelerator.name} keeps the chance of"
            f" running out of memory below {limit}."
        )
    best = found.best[0]
    return (
        f"Fastest of those with less than {limit} chance of running out of memory:"
        f" {layout_words(best.layout)}; {best.estimate.step_time_s:.3g} s a step predicted."
    )


def _parting_words(question: LayoutQuestion) -> list[str]:
    """Where the batch leaves out replicas for a reason that a few sequences more or less mend: what accelerators cannot
    be replicas must be something else, and a number of them that is no power of two is seldom meant to be."""
    number, sequences = question.cluster.num_accelerators, question.batch_sequences
    most = gcd(number, sequences)
    apart = number // most
    if apart & (apart - 1) == 0:
        return []
    less = sequences // number * number
    others = " or ".join(str(size) for size in (less, less + number) if size)
    return [
        f"{sequences} sequences part among {most} of {number} accelerators at most, as replicas: no layout with more was searched."
        f" A batch of {others} parts among all."
    ]


def _table(title: str, layouts: tuple[Priced, ...]) -> Table:
    return layouts_table(
        title,
        "s a step",
        (
            (
                layout_words(one.layout),
                f"{one.estimate.step_time_s:.4g}",
                one.estimate.mfu,
                one.estimate.peak_memory_bytes,
                one.estimate.p_oom,
            )
            for one in layouts
        ),
    )


def _counts_words(counts: SearchCounts) -> str:
    return (
        f"{counted(counts.num_layouts, 'layout')}: {counts.num_estimated} estimated, {counts.num_too_slow} shown to be slower and"
        f" {counts.num_too_large} to need too much memory without, {counts.num_failed} impossible."
    )


def found_to_json(
    question: LayoutQuestion, found: FoundLayouts, reasons: tuple[Reason, ...]
) -> dict[str, Any]:
    """Keys are stable (docs/layouts.md)."""
    counts = found.counts
    return {
        "format": 1,
        "kind": "predicted",
        "num_accelerators": question.cluster.num_accelerators,
        "batch_sequences": question.batch_sequences,
        "seq_len": question.seq_len,
        "max_p_oom": question.max_p_oom,
        "best": [
            {**priced_to_json(one), "why": _reason_to_json(reason)}
            for one, reason in zip(found.best, reasons, strict=True)
        ],
        "front": [priced_to_json(one) for one in found.front],
        "counts": {name: getattr(counts, name) for name in SearchCounts.__dataclass_fields__},
    }


def priced_to_json(one: Priced) -> dict[str, Any]:
    estimate = one.estimate
    return {
        "layout": _layout_to_json(one.layout),
        "step_time_s": estimate.step_time_s,
        "peak_memory_bytes": round(estimate.peak_memory_bytes),
        "p_oom": estimate.p_oom,
        "mfu": estimate.mfu,
    }


def _reason_to_json(reason: Reason) -> dict[str, Any]:
    return {
        "text": reason_words(reason),
        "spent": {what.replace(" ", "_"): share for what, share in reason.spent.items()},
        "plain_data_parallel": None if reason.plain is None else _neighbour_to_json(reason.plain),
        "balanced_stages": None if reason.balanced is None else _neighbour_to_json(reason.balanced),
        "neighbours": [_neighbour_to_json(one) for one in reason.neighbours],
    }


def _neighbour_to_json(one: Neighbour) -> dict[str, Any]:
    return {
        "change": one.change,
        "layout": _layout_to_json(one.layout),
        "total_bytes": round(one.total_bytes),
        "p_oom": one.p_oom,
        "is_safe": one.is_safe,
        "step_time_s": one.step_time_s,
    }


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in type(layout).__dataclass_fields__}
