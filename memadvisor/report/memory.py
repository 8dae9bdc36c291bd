"""Memory over the traced step, by category."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memadvisor.analyzers.comparison import Comparison
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.category_words import category_name
from memadvisor.report.blocks import MEASURED, PREDICTED, Block, Figure, Missing
from memadvisor.report.downsample import kept_indices, packed, packed_places
from memadvisor.report.lanes import lane_axis, phase_bands, step_lanes, time_axis
from memadvisor.report.view import RankView
from memadvisor.report.words import STACK, bytes_scale, color_of, seconds_scale
from memadvisor.run.records import UNEXPLAINED
from memadvisor.units import format_bytes

# Of the drawing's width; in a narrow window a peak's label takes a sixth of it.
_NEAR_EDGE = 0.1


def memory_over_time(view: RankView) -> Block:
    """Stacked areas by category, with the peak, the phases and, with a plan, what was predicted."""
    title = "Memory over the traced step"
    timeline, peak = view.result.timeline, view.result.peak
    if timeline is None or peak is None:
        return Missing(name="memory", title=title, why=view.why_untraced)
    factor, unit = bytes_scale([peak.allocated_bytes])
    time_factor, time_unit = seconds_scale([view.step.duration_s])
    kept = kept_indices(timeline, 3 * view.detail)
    compared = view.analysis.comparison
    drawn = (
        ""
        if len(kept) == len(timeline.times_s)
        else f" Drawn: {len(kept)} of {len(timeline.times_s)} moments, maxima exact."
    )
    return Figure(
        name="memory",
        title=title,
        kinds=(MEASURED,) if compared is None else (MEASURED, PREDICTED),
        basis=view.traced_basis,
        label=f"Stacked areas by category; peak {format_bytes(peak.allocated_bytes)} in {peak.position}.",
        traces=[
            *stacked_areas(timeline, kept, factor, unit, time_factor),
            *step_lanes(view, time_factor, "y2"),
        ],
        layout={
            "xaxis": {**time_axis(view, time_factor, time_unit), "anchor": "y"},
            "yaxis": {
                "domain": [0, 0.85],
                "title": {"text": unit},
                "rangemode": "tozero",
                "range": [min(0.0, _lowest(timeline) / factor), 1.14 * _top(peak, compared) / factor],
            },
            "yaxis2": {**lane_axis([0.89, 1]), "anchor": "x"},
            "hovermode": "x unified",
            "barmode": "overlay",
            "uniformtext": {"minsize": 9, "mode": "hide"},
            "shapes": [*phase_bands(view, time_factor), *_lines(peak, compared, factor)],
            "annotations": [
                _peak_mark(peak, view.step.duration_s, factor, time_factor),
                *_predicted_labels(compared, factor),
            ],
        },
        height_px=520,
        note="Bytes alive on the rank's device, by what they are. A storage counts once, from its birth to its "
        "death; the hatched rest is what the allocator reports and no storage explains." + drawn,
    )


def stacked_areas(
    timeline: MemoryTimeline, kept: np.ndarray[Any, Any], factor: float, unit: str, time_factor: float
) -> Iterator[dict[str, Any]]:
    """Each category on what is below it, and a line of the sum."""
    times = packed_places(timeline.times_s[kept] / time_factor)
    for category in STACK:
        sizes = timeline.by_category_bytes[category]
        if not sizes.any() and category != UNEXPLAINED:
            continue
        area: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "name": category_name(category),
            "x": times,
            "y": packed(sizes[kept] / factor),
            "stackgroup": "memory",
            "line": {"shape": "hv", "width": 0.6, "color": color_of(category)},
            "fillcolor": color_of(category),
            "hovertemplate": f"%{{y:,.2f}} {unit}",
        }
        if category == UNEXPLAINED:
            area["fillpattern"] = {
                "shape": "/",
                "size": 6,
                "fgcolor": color_of(category),
                "bgcolor": "var(--card)",
            }
        yield area
    yield {
        "type": "scatter",
        "mode": "lines",
        "name": "together",
        "x": times,
        "y": packed(timeline.total_bytes[kept] / factor),
        "line": {"shape": "hv", "width": 1, "color": "var(--text)"},
        "hovertemplate": f"<b>%{{y:,.2f}} {unit}</b>",
        "showlegend": False,
    }


def _lowest(timeline: MemoryTimeline) -> float:
    return float(min(sizes.min() for sizes in timeline.by_category_bytes.values()))


def _top(peak: PeakBreakdown, compared: Comparison | None) -> float:
    """A budget far above what was used would squeeze the picture: it is then left to the table."""
    predicted = compared.peak_bytes.predicted if compared is not None else None
    budget = compared.budget_bytes if compared is not None else None
    lines = [line for line in (predicted, budget) if line is not None and line < 2 * peak.allocated_bytes]
    return max(float(peak.allocated_bytes), *lines, float(peak.timeline_bytes))


def anchor_within(share: float) -> str:
    """Where a label is held that stands at this share of a drawing's width, so that none of it is cut off."""
    return "left" if share < _NEAR_EDGE else "right" if share > 1 - _NEAR_EDGE else "center"


def _peak_mark(peak: PeakBreakdown, duration_s: float, factor: float, time_factor: float) -> dict[str, Any]:
    return {
        "x": peak.time_s / time_factor,
        "y": peak.timeline_bytes / factor,
        "text": f"<b>peak {format_bytes(peak.allocated_bytes)}</b>",
        "xanchor": anchor_within(peak.time_s / duration_s if duration_s else 0.5),
        "showarrow": True,
        "arrowhead": 2,
        "arrowcolor": "var(--text)",
        "ax": 0,
        "ay": -26,
        "bgcolor": "var(--card)",
        "bordercolor": "var(--line)",
        "borderpad": 3,
        "font": {"color": "var(--text)"},
    }


def _line(y: float, dash: str, color: str) -> dict[str, Any]:
    line = {"width": 1.5, "dash": dash, "color": color}
    return {"type": "line", "xref": "x domain", "yref": "y", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _lines(peak: PeakBreakdown, compared: Comparison | None, factor: float) -> Iterator[dict[str, Any]]:
    yield _line(peak.allocated_bytes / factor, "dot", "var(--dim)")
    if compared is None:
        return
    if compared.peak_bytes.predicted is not None:
        yield _line(compared.peak_bytes.predicted / factor, "dash", "var(--optimizer-state)")
    if compared.budget_bytes is not None:
        yield _line(compared.budget_bytes / factor, "longdash", "var(--exposed)")


def _predicted_labels(compared: Comparison | None, factor: float) -> Iterator[dict[str, Any]]:
    if compared is None:
        return
    for name, size, anchor, color in (
        ("predicted peak", compared.peak_bytes.predicted, "bottom", "var(--optimizer-state)"),
        ("budget", compared.budget_bytes, "bottom", "var(--exposed)"),
    ):
        if size is not None:
            yield {
                "xref": "x domain",
                "x": 0.005 if name == "budget" else 0.995,
                "xanchor": "left" if name == "budget" else "right",
                "y": size / factor,
                "yanchor": anchor,
                "showarrow": False,
                "text": f"{name} {format_bytes(size)}",
                "font": {"color": color, "size": 11},
                "bgcolor": "var(--card)",  # another line may be where it stands
            }
