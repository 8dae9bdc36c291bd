"""Where in the step a moment is: bands and lanes that every figure over the traced step shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memadvisor.report.escape import plotly_text, shortened
from memadvisor.report.view import RankView
from memadvisor.report.words import PHASE_NAMES, color_of, unit_name
from memadvisor.run.records import Span
from memadvisor.units import format_seconds

PHASES = ("forward", "backward", "optimizer")
_EVALUATION = (
    "evaluation"  # a model call without gradients: part of what is outside all phases, and colored so
)


def time_axis(view: RankView, factor: float, unit: str) -> dict[str, Any]:
    return {
        "title": {"text": f"time in the traced step ({unit})"},
        "range": [0, view.step.duration_s / factor],
        "zeroline": False,
        "hoverformat": ".4~g",
        "spikecolor": "var(--dim)",
        "spikethickness": 1,
    }


def phase_bands(view: RankView, factor: float) -> list[dict[str, Any]]:
    """A faint band behind the figure for each forward, backward and optimizer step."""
    start_s = view.step.start_s
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "y domain",
            "x0": (span.start_s - start_s) / factor,
            "x1": (span.end_s - start_s) / factor,
            "y0": 0,
            "y1": 1,
            "fillcolor": color_of(span.kind),
            "opacity": 0.08,
            "line": {"width": 0},
            "layer": "below",
        }
        for span in view.spans()
        if span.kind in PHASES
    ]


def step_lanes(view: RankView, factor: float, axis: str) -> list[dict[str, Any]]:
    """Two rows on the axis `axis`: phases (at 1), and the units inside them (at 0)."""
    spans = view.spans()
    units = [span for span in spans if span.kind.startswith("unit_")]
    units = sorted(units, key=lambda s: s.start_s - s.end_s)[: 2 * view.detail]
    units.sort(key=lambda s: (s.start_s, -s.end_s))
    return [
        phase_lane(view, 1.0, factor, axis),
        _lane(
            units,
            0.0,
            view.step.start_s,
            factor,
            axis,
            texts=_unit_texts(units),
        ),
    ]


def _unit_texts(units: Sequence[Span]) -> list[str]:
    """The units' names; none of a bar that another one lies on: a name would come out beneath it in pieces.

    `units` are in order of their starts, of those that begin together the longest first.
    """
    is_covered = [False] * len(units)
    around: list[int] = []
    for position, span in enumerate(units):
        while around and units[around[-1]].end_s <= span.start_s:
            around.pop()
        if around:
            is_covered[around[-1]] = True
        around.append(position)
    return [
        "" if hidden else shortened(unit_name(span.unit), 18)
        for span, hidden in zip(units, is_covered, strict=True)
    ]


def phase_lane(view: RankView, row: float, factor: float, axis: str) -> dict[str, Any]:
    """Forwards, backwards, optimizer steps and evaluations, as bars in one row."""
    phases = [span for span in view.spans() if span.kind in (*PHASES, _EVALUATION)]
    return _lane(phases, row, view.step.start_s, factor, axis, texts=[_name(s.kind) for s in phases])


def _name(phase: str) -> str:
    return PHASE_NAMES.get(phase, phase)


def lane_axis(domain: Sequence[float], names: Sequence[str] = ("unit", "phase")) -> dict[str, Any]:
    """`names`: of its two lanes, from below."""
    return {
        "domain": list(domain),
        "range": [-0.5, 1.5],
        "tickvals": [0, 1],
        "ticktext": list(names),
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }


def _lane(
    spans: Sequence[Span], row: float, start_s: float, factor: float, axis: str, texts: Sequence[str]
) -> dict[str, Any]:
    phases = [span.kind.removeprefix("unit_") for span in spans]
    hovers = [
        f"{_name(phase)}{f' of {unit_name(span.unit)}' if span.kind.startswith('unit_') else ''}, "
        f"micro-batch {span.micro_batch}: {format_seconds(span.end_s - span.start_s)}"
        for span, phase in zip(spans, phases, strict=True)
    ]
    return bars(
        ((span.start_s - start_s, span.end_s - start_s) for span in spans),
        rows=[row] * len(spans),
        heights=[0.82] * len(spans),
        factor=factor,
        colors=[color_of("outside" if phase == _EVALUATION else phase) for phase in phases],
        texts=texts,
        hovers=hovers,
        more={"yaxis": axis, "showlegend": False},
    )


def bars(
    stretches: Iterable[tuple[float, float]],
    *,
    rows: Sequence[float],
    heights: Sequence[float],
    factor: float,
    colors: Sequence[str] | str,
    texts: Sequence[str] = (),
    hovers: Sequence[str],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Horizontal bars from start to end; texts and hovers are plain, and escaped here."""
    pairs = list(stretches)
    names = colors if isinstance(colors, str) else list(colors)
    font = (
        {
            "insidetextfont": {
                "size": 11,
                "color": [text_on(name) for name in names] if isinstance(names, list) else text_on(names),
            }
        }
        if texts
        else {}
    )
    return {
        "type": "bar",
        "orientation": "h",
        "base": [start / factor for start, _ in pairs],
        "x": [(end - start) / factor for start, end in pairs],
        "y": list(rows),
        "width": list(heights),
        "marker": {
            "color": names,
            "line": {"width": 0.5, "color": "var(--card)"},
        },
        "text": [plotly_text(text) for text in texts] if texts else None,
        "textposition": "inside" if texts else "none",
        "insidetextanchor": "middle",
        "textangle": 0,
        "hovertext": [plotly_text(text) for text in hovers],
        "hoverinfo": "text",
        **font,
        **more,
    }


def text_on(color: str) -> str:
    """`var(--on-forward)` on `var(--forward)`: Plotly's own choice is hard to read on some."""
    return color.replace("var(--", "var(--on-")
