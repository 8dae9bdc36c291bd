"""Memory of two runs over their traced steps, on one axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memadvisor.report.blocks import MEASURED, Block, Figure, Missing
from memadvisor.report.difference_view import PairView
from memadvisor.report.downsample import kept_indices, packed, packed_places
from memadvisor.report.lanes import lane_axis, phase_lane
from memadvisor.report.memory import stacked_areas
from memadvisor.report.view import RankView
from memadvisor.report.words import bytes_scale, seconds_scale
from memadvisor.units import format_bytes

_OVER_TIME = "Memory over the traced step, both on one axis"


def memory_over_both(view: PairView) -> Block:
    """The two sums as lines over the same axes, with the phases of each above them."""
    if view.before.result.timeline is None or view.after.result.timeline is None:
        return Missing(name="both-memory", title=_OVER_TIME, why=view.why_untraced)
    (factor, unit), (time_factor, time_unit) = _scales(view)
    peaks = [side.result.known_peak_bytes for _, side in view.sides]
    return Figure(
        name="both-memory",
        title=_OVER_TIME,
        kinds=(MEASURED,),
        basis=view.traced_basis,
        label=f"Two lines; peak {format_bytes(peaks[0])} before, {format_bytes(peaks[1])} after.",
        traces=[*_sums(view, factor, time_factor, unit), *_phases(view, time_factor)],
        layout={
            "xaxis": {**_time_axis(view, time_factor, time_unit), "anchor": "y"},
            "yaxis": {
                "domain": [0, 0.82],
                "title": {"text": unit},
                "range": [0, 1.08 * highest_bytes(view) / factor],
            },
            "yaxis2": lane_axis((0.86, 1), ("after", "before")) | {"anchor": "x"},
            "hovermode": "x unified",
            "barmode": "overlay",
            "uniformtext": {"minsize": 9, "mode": "hide"},
        },
        height_px=430,
        note="All that is alive on the rank's device, from the beginning of each run's own traced step: tracing makes steps "
        "longer, so the lengths compare roughly, and the heights to the byte.",
    )


def memory_by_category(view: PairView) -> Block | None:
    """The stacked areas of both runs, one above the other, on the same scales."""
    if view.before.result.timeline is None or view.after.result.timeline is None:
        return None
    (factor, unit), (time_factor, time_unit) = _scales(view)
    axis = {"title": {"text": unit}, "range": [0, 1.08 * highest_bytes(view) / factor]}
    shown: set[str] = set()
    traces: list[dict[str, Any]] = []
    for place, (_, side) in enumerate(view.sides):
        for trace in _areas_of(side, factor, unit, time_factor):
            first = trace["name"] not in shown
            shown.add(trace["name"])
            on = {"yaxis": "y2"} if place else {}
            group = {"stackgroup": f"memory{place}"} if "stackgroup" in trace else {}
            traces.append(
                {**trace, **on, **group, "legendgroup": trace["name"], "showlegend": first and bool(group)}
            )
    return Figure(
        name="both-categories",
        title="The same by category",
        kinds=(MEASURED,),
        basis=view.traced_basis,
        label="Stacked areas by category, before above after.",
        traces=traces,
        layout={
            "xaxis": {**_time_axis(view, time_factor, time_unit), "anchor": "y2"},
            "yaxis": {**axis, "title": {"text": f"before ({unit})"}, "domain": [0.54, 1]},
            "yaxis2": {**axis, "title": {"text": f"after ({unit})"}, "domain": [0, 0.46], "anchor": "x"},
            "hovermode": "closest",
        },
        height_px=560,
    )


def _scales(view: PairView) -> tuple[tuple[float, str], tuple[float, str]]:
    return bytes_scale([highest_bytes(view)]), seconds_scale([side.step.duration_s for _, side in view.sides])


def highest_bytes(view: PairView) -> float:
    """The highest sum of either, which is the top of an axis of both."""
    timelines = [side.result.timeline for _, side in view.sides]
    return max(float(found.total_bytes.max()) for found in timelines if found is not None)


def _time_axis(view: PairView, factor: float, unit: str) -> dict[str, Any]:
    return {
        "title": {"text": f"time in the traced step ({unit})"},
        "range": [0, max(side.step.duration_s for _, side in view.sides) / factor],
        "zeroline": False,
        "hoverformat": ".4~g",
    }


def _sums(view: PairView, factor: float, time_factor: float, unit: str) -> Iterator[dict[str, Any]]:
    looks = ({"dash": "dot", "width": 2, "color": "var(--dim)"}, {"width": 2, "color": "var(--forward)"})
    for (name, side), look in zip(view.sides, looks, strict=True):
        timeline = side.result.timeline
        assert timeline is not None
        kept = kept_indices(timeline, 2 * side.detail)
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": packed_places(timeline.times_s[kept] / time_factor),
            "y": packed(timeline.total_bytes[kept] / factor),
            "line": {"shape": "hv", **look},
            "hovertemplate": f"%{{y:,.2f}} {unit}",
        }


def _areas_of(side: RankView, factor: float, unit: str, time_factor: float) -> Iterator[dict[str, Any]]:
    timeline = side.result.timeline
    assert timeline is not None
    yield from stacked_areas(timeline, kept_indices(timeline, 2 * side.detail), factor, unit, time_factor)


def _phases(view: PairView, time_factor: float) -> Iterator[dict[str, Any]]:
    for row, (_, side) in zip((1.0, 0.0), view.sides, strict=True):
        yield phase_lane(side, row, time_factor, "y2")
