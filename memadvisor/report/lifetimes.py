"""What autograd keeps for the backward: each storage from birth to release, and the sums by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from memadvisor.analyzers.activations import Activations, Lifetime
from memadvisor.report.blocks import MEASURED, Block, Figure, Missing, table
from memadvisor.report.escape import plotly_text, shortened
from memadvisor.report.lanes import bars, phase_bands, time_axis
from memadvisor.report.view import RankView
from memadvisor.report.words import bytes_scale, seconds_scale, unit_name
from memadvisor.units import counted, format_bytes, format_fraction, format_seconds

NAMED_SHARE = 0.025  # of the figure's height, below which a unit's name would not fit
MAX_UNITS = 60


def activation_lifetimes(view: RankView) -> Block:
    """Bars from birth over saving to release; as thick as the storage is large, together by unit."""
    title = "Activation lifetimes"
    kept = view.result.activations
    if kept is None:
        return Missing(name="activations", title=title, why=view.why_untraced)
    if not kept.lifetimes:
        why = "In the traced step autograd kept only model states and what was there before it."
        return Missing(name="activations", title=title, why=why, absence="None.")
    shown = _shown(kept, 2 * view.detail)
    shown_bytes = sum(life.size_bytes for life in shown)
    all_bytes = sum(life.size_bytes for life in kept.lifetimes)
    factor, _ = bytes_scale([shown_bytes])
    time_factor, time_unit = seconds_scale([view.step.duration_s])
    starts, extents = _rows(shown)
    height_bytes = max(bottom for _, bottom in extents.values())
    rows = [(start + life.size_bytes / 2) / factor for start, life in zip(starts, shown, strict=True)]
    ticks = _unit_ticks(extents)
    return Figure(
        name="activations",
        title=title,
        kinds=(MEASURED,),
        basis=view.traced_basis,
        label=f"{counted(len(shown), 'storage')} that autograd kept, {format_bytes(shown_bytes)}, grouped by unit.",
        traces=_traces(shown, rows, view.step.duration_s, factor, time_factor),
        layout={
            "xaxis": time_axis(view, time_factor, time_unit),
            "yaxis": {
                "range": [height_bytes / factor, 0],
                "tickvals": [tick / factor for tick, _ in ticks],
                "ticktext": [plotly_text(text) for _, text in ticks],
                "showgrid": False,
                "zeroline": False,
            },
            "barmode": "overlay",
            "hovermode": "closest",
            "shapes": phase_bands(view, time_factor),
        },
        height_px=min(820, 240 + 14 * len(kept.units)),
        note="A bar is as thick as its storage is large, so its area is what keeping it costs; the full height is "
        f"{format_bytes(height_bytes)}. Drawn: {len(shown)} of {counted(len(kept.lifetimes), 'storage')}, "
        f"{format_fraction(shown_bytes / all_bytes if all_bytes else None)} of the bytes, all micro-batches.",
    )


def _shown(kept: Activations, num_shown: int) -> list[Lifetime]:
    """The largest lifetimes, unit by unit in order of first save, then by micro-batch and time."""
    order = {unit.name: position for position, unit in enumerate(kept.units)}
    largest = sorted(kept.lifetimes, key=lambda life: -life.size_bytes)[:num_shown]
    return sorted(
        largest,
        key=lambda life: (order.get(life.unit, len(order)), life.unit, life.micro_batch, life.saved_s),
    )


def _rows(shown: Sequence[Lifetime]) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """In bytes from the top: where each bar begins, and where each unit begins and ends.

    A unit's micro-batches share its rows where one is over before the next begins.
    """
    starts, extents, reached = [], {}, 0
    for unit, lives in groupby(shown, key=lambda life: life.unit):
        batches = [list(batch) for _, batch in groupby(lives, key=lambda life: life.micro_batch)]
        is_shared = all(_are_apart(before, after) for before, after in pairwise(batches))
        bottom = offset = reached
        for batch in batches:
            offset = reached if is_shared else offset
            for life in batch:
                starts.append(offset)
                offset += life.size_bytes
            bottom = max(bottom, offset)
        extents[unit] = (reached, bottom)
        reached = bottom
    return starts, extents


def _are_apart(before: Sequence[Lifetime], after: Sequence[Lifetime]) -> bool:
    released = [life.released_s for life in before if life.released_s is not None]
    return len(released) == len(before) and max(released) <= min(life.born_s for life in after)


def _unit_ticks(extents: Mapping[str, tuple[int, int]]) -> list[tuple[float, str]]:
    """A name at the middle of each unit's rows, in bytes, where it has room."""
    height = max(bottom for _, bottom in extents.values())
    return [
        ((top + bottom) / 2, f"{shortened(unit_name(unit), 20)} · {format_bytes(bottom - top)}")
        for unit, (top, bottom) in extents.items()
        if bottom - top >= NAMED_SHARE * height
    ]


def _traces(
    shown: Sequence[Lifetime], rows: list[float], end_s: float, factor: float, time_factor: float
) -> list[dict[str, Any]]:
    heights = [life.size_bytes / factor for life in shown]
    hovers = [_hover(life) for life in shown]
    kept = [(life.saved_s, life.released_s if life.released_s is not None else end_s) for life in shown]
    made = [(life.born_s, max(life.born_s, life.saved_s)) for life in shown]
    released = [life.released_s is not None for life in shown]
    traces = []
    for name, stretches, color, pattern, wanted in (
        ("made, not yet saved", made, "var(--kept-light)", "", [True] * len(shown)),
        ("kept for the backward", kept, "var(--activation)", "", released),
        ("kept, release not recorded", kept, "var(--activation)", "/", [not seen for seen in released]),
    ):
        chosen = [position for position, is_wanted in enumerate(wanted) if is_wanted]
        if not chosen:
            continue
        trace = bars(
            [stretches[i] for i in chosen],
            rows=[rows[i] for i in chosen],
            heights=[heights[i] for i in chosen],
            factor=time_factor,
            colors=color,
            hovers=[hovers[i] for i in chosen],
            more={"name": name},
        )
        if pattern:
            trace["marker"]["pattern"] = {"shape": pattern, "fillmode": "overlay", "fgcolor": "var(--card)"}
        traces.append(trace)
    return traces


def _hover(life: Lifetime) -> str:
    made = life.operator.removeprefix("aten::") or "unknown operator"
    kept = "release not recorded" if life.kept_s is None else f"kept {format_seconds(life.kept_s)}"
    saved_by = ", ".join(name.removeprefix("aten::") for name in life.saved_by if name)
    others = ", ".join(map(unit_name, life.other_modules[:3]))
    return (
        f"{life.module or unit_name(life.unit)}: {format_bytes(life.size_bytes)}, {life.shape} {life.dtype}, "
        f"by {made}; {kept}"
        + (f"; codes of {format_bytes(life.original_bytes)}" if life.original_bytes is not None else "")
        + ("; back from another tier" if life.returned_of is not None else "")
        + (f"; saved by {saved_by}" if saved_by else "")
        + (f"; also kept by {others}" if others else "")
        + ("; held outside autograd too" if life.is_held_elsewhere else "")
    )


def saved_by_unit(view: RankView) -> Block | None:
    """What each unit keeps of one micro-batch, and the operators that made it."""
    kept = view.result.activations
    if kept is None or not kept.units:
        return None
    largest = sorted(kept.units, key=lambda unit: -unit.saved_bytes)[:MAX_UNITS]
    chosen = {unit.name for unit in largest}
    more = len(kept.units) - len(largest)
    return table(
        "Kept for the backward, by unit",
        ("unit", "mostly made by", "storages", "bytes", "share"),
        (
            (
                unit_name(unit.name),
                _operators(unit.by_operator_bytes),
                str(unit.num_storages),
                format_bytes(unit.saved_bytes),
                format_fraction(unit.saved_bytes / kept.saved_bytes if kept.saved_bytes else None),
            )
            for unit in kept.units
            if unit.name in chosen
        ),
        kinds=(MEASURED,),
        basis=f"{view.traced_basis}, one micro-batch ({format_bytes(kept.saved_bytes)} in all)",
        num_text=2,
        note=f"{more} smaller units are left out." if more else "",
    )


def _operators(by_operator_bytes: dict[str, int]) -> str:
    shown = [
        (name.removeprefix("aten::"), size) for name, size in list(by_operator_bytes.items())[:3] if name
    ]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in shown) or "-"
