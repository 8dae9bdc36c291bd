"""A pipeline's step, predicted: what each device computes when, where it waits, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from memadvisor.cost.pipelines import Kind, PipelineTimes, Played
from memadvisor.report.blocks import PREDICTED, Block, Figure, Section, table
from memadvisor.report.document import document, section_html, write_page
from memadvisor.report.downsample import merged
from memadvisor.report.lanes import bars
from memadvisor.report.words import seconds_scale
from memadvisor.units import format_bytes, format_fraction, format_seconds

MAX_PIECES = 6000  # drawn one by one; of more, only that a device computes
MAX_TEXTS = 1500
MAX_ROWS = 64
NAMES = {
    Kind.F: ("forward", "var(--forward)"),
    Kind.B: ("input gradient", "var(--backward)"),
    Kind.W: ("weight gradient", "var(--optimizer)"),
    Kind.BW: ("backward", "var(--backward)"),
}


def write_pipeline_report(times: PipelineTimes, path: Path) -> None:
    """Write the section as a page of its own. `times` needs its timeline. Raises UsageError."""
    figures: dict[str, object] = {}
    body = section_html(pipeline_section(times), "0", figures)
    header = '<header><span class="brand">memadvisor</span></header>\n'
    page = f'{header}<div class="page alone"><main>{body}</main></div>\n'
    write_page(document(f"pipeline {times.schedule}", page, figures), path)


def pipeline_section(times: PipelineTimes) -> Section:
    """The schedule drawn, and a table by device."""
    return Section(
        name="pipeline",
        title=f"Pipeline {times.schedule}",
        lead="What each device computes when, where it waits, and what it holds: simulated, not measured.",
        shared=[schedule_figure(times), device_table(times)],
    )


def schedule_figure(times: PipelineTimes) -> Block:
    """A lane for each device; a bar for each piece of work."""
    assert times.timeline is not None, "simulate with timeline=True"
    factor, unit = seconds_scale([times.makespan_s])
    pieces = times.timeline
    one_by_one = len(pieces) <= MAX_PIECES
    height_px = max(180, min(900, 110 + 26 * times.num_devices))
    return Figure(
        name="pipeline",
        title=f"{times.schedule} on {times.num_devices} devices, {times.num_microbatches} micro-batches",
        kinds=(PREDICTED,),
        basis="simulated with transfers",
        label=f"A step takes {format_seconds(times.step_s)}, of which devices are idle "
        f"{format_fraction(times.bubble_share)}.",
        traces=_pieces(times, factor) if one_by_one else [_busy(times, factor)],
        layout={
            "xaxis": {
                "title": {"text": f"time in the step ({unit})"},
                "range": [0, times.makespan_s / factor],
                "zeroline": False,
            },
            "yaxis": {
                "title": {"text": "device"},
                "range": [times.num_devices - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
                "dtick": max(1, times.num_devices // 16),
            },
            "barmode": "overlay",
            "hovermode": "closest",
            "uniformtext": {"minsize": 8, "mode": "hide"},
        },
        height_px=height_px,
        note=_note(times, one_by_one),
    )


def _note(times: PipelineTimes, one_by_one: bool) -> str:
    copies = ""
    if times.weight_copies > 1:
        copies = f" Each device holds {times.weight_copies} stages, one of either direction's weights."
    if times.weight_versions > 1:
        copies += f" Weights are kept in {times.weight_versions} versions."
    if one_by_one:
        return f"A bar is one micro-batch on one chunk of the model; its number is the micro-batch's.{copies}"
    return (
        f"The {len(times.timeline or ())} pieces of work are too many to draw one by one: a bar is where a device "
        f"computes without a pause that could be seen.{copies}"
    )


def _pieces(times: PipelineTimes, factor: float) -> list[dict[str, Any]]:
    """One trace for each kind of work and each of a device's chunks, the later ones paler."""
    places = [{chunk: place for place, chunk in enumerate(held)} for held in times.chunks]
    pieces = sorted(times.timeline or (), key=lambda p: (p.kind, places[p.device][p.chunk]))
    most = max(len(held) for held in times.chunks)
    traces = []
    for (kind, place), group in groupby(pieces, key=lambda p: (p.kind, places[p.device][p.chunk])):
        drawn = list(group)
        name, color = NAMES[kind]
        trace = bars(
            [(piece.start_s, piece.end_s) for piece in drawn],
            rows=[float(piece.device) for piece in drawn],
            heights=[0.86] * len(drawn),
            factor=factor,
            colors=color,
            texts=[str(piece.microbatch) for piece in drawn] if len(pieces) <= MAX_TEXTS else [],
            hovers=[_hover(piece) for piece in drawn],
            more={"name": name if most == 1 else f"{name}, {_ordinal(place)} chunk"},
        )
        trace["marker"]["opacity"] = 1.0 - 0.55 * place / max(1, most - 1)
        traces.append(trace)
    return traces


def _ordinal(place: int) -> str:
    return ("first", "second", "third")[place] if place < 3 else f"{place + 1}th"


def _hover(piece: Played) -> str:
    return (
        f"{NAMES[piece.kind][0]} of micro-batch {piece.microbatch}, chunk {piece.chunk}, device {piece.device}: "
        f"{format_seconds(piece.end_s - piece.start_s)} from {format_seconds(piece.start_s)}"
    )


def _busy(times: PipelineTimes, factor: float) -> dict[str, Any]:
    """Where each device computes, with pauses that nobody could see closed."""
    pause_s = times.makespan_s * times.num_devices / MAX_PIECES
    stretches: list[tuple[float, float]] = []
    rows: list[float] = []
    for device, group in groupby(times.timeline or (), key=lambda piece: piece.device):
        own = merged([(piece.start_s, piece.end_s) for piece in group], pause_s)
        stretches += own
        rows += [float(device)] * len(own)
    return bars(
        stretches,
        rows=rows,
        heights=[0.86] * len(rows),
        factor=factor,
        colors="var(--forward)",
        hovers=[
            f"device {row:.0f} computes for {format_seconds(end - start)}"
            for row, (start, end) in zip(rows, stretches, strict=True)
        ],
        more={"name": "computing"},
    )


def device_table(times: PipelineTimes) -> Block:
    """Busy time, idle share and peak of every device, or of the first and last ones of very many."""
    devices: Sequence[int] = range(times.num_devices)
    left_out = times.num_devices - MAX_ROWS
    if left_out > 0:
        devices = [*devices[: MAX_ROWS // 2], *devices[-MAX_ROWS // 2 :]]
    return table(
        "By device",
        ("device", "chunks", "computing", "idle", "micro-batches held", "activations held"),
        (
            (
                str(device),
                _chunk_names(times.chunks[device]),
                format_seconds(times.busy_s[device]),
                format_fraction(1 - times.busy_s[device] / times.step_s if times.step_s else 0.0),
                str(times.peak_in_flight[device]),
                format_bytes(times.peak_held_bytes[device]) if any(times.peak_held_bytes) else "not given",
            )
            for device in devices
        ),
        kinds=(PREDICTED,),
        num_text=2,
        note="Held is the most at one moment; micro-batches of several chunks count for each chunk."
        + (f" {left_out} devices between are left out." if left_out > 0 else ""),
    )


def _chunk_names(chunks: Sequence[int]) -> str:
    shown = ", ".join(str(chunk) for chunk in chunks[:8])
    return shown + (" ..." if len(chunks) > 8 else "")
