"""Arithmetic against memory: the roofline with units and modules on it, and what each operator cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memadvisor.analyzers.operators import OperatorTotal
from memadvisor.analyzers.roofline import LATENCY_BELOW_FRACTION, Roofline, RooflinePoint
from memadvisor.report.blocks import MEASURED, Block, Figure, Missing, table
from memadvisor.report.escape import plotly_text, shortened
from memadvisor.report.view import RankView
from memadvisor.report.words import unit_name
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds

_LAUNCH = "times are of launching: the device runs operators later"
_BYTES = "Bytes are the least that operators must move, each element once. Elementwise work counts no FLOPs."
_RULE = (
    f"{_BYTES} Bound by latency: under {format_fraction(LATENCY_BELOW_FRACTION)} of what arithmetic and memory allow; else by the "
    "lower of the two roofs."
)


def roofline_figure(view: RankView) -> Block | None:
    """FLOP/s against FLOP/byte, both logarithmic; units by timed steps, modules by the traced one."""
    roof = view.result.roofline
    title = "Roofline"
    if roof is None:
        return Missing(name="roofline", title=title, why=view.why_untraced)
    units, modules = (_drawable(points)[: view.detail // 3] for points in (roof.units, roof.modules))
    if not units and not modules:
        return Missing(name="roofline", title=title, why="No unit has FLOPs, bytes and a time of its own.")
    traces = [
        _points(units, "units", "var(--activation)", 11),
        _points(modules, "modules", "var(--dim)", 6),
    ]
    lines = _roofs(roof, [p.intensity_flops_per_byte or 1.0 for p in (*units, *modules)])
    kinds = (MEASURED,) if view.analysis.hardware is None else (MEASURED, view.analysis.hardware.kind)
    ridge = roof.ridge_flops_per_byte
    return Figure(
        name="roofline",
        title=title,
        kinds=tuple(dict.fromkeys(kinds)),
        basis=f"FLOPs and bytes of the {view.traced_basis}",
        label="Arithmetic intensity and FLOP/s of units and modules"
        + (f"; the ridge is at {ridge:.3g} FLOP/byte" if ridge else "; the hardware's roofs are not known"),
        traces=[*lines, *traces],
        layout={
            # A format of its own: without one plotly writes bare digits between powers of ten.
            "xaxis": {"type": "log", "title": {"text": "FLOP/byte"}, "tickformat": "~g"},
            "yaxis": {"type": "log", "title": {"text": "FLOP/s"}, "tickformat": "~s"},
            "hovermode": "closest",
            "showlegend": False,
        },
        height_px=420,
        note=_RULE if lines else f"No roofs: {_why_no_roofs(roof)}. {_BYTES}",
        legend=(("units", "var(--activation)"), ("modules", "var(--dim)")),
    )


def _why_no_roofs(roof: Roofline) -> str:
    if roof.peak_flops_per_s is None:
        return "no peak FLOP/s is known for this device"
    return "no memory bandwidth is known for this device"


def _drawable(points: Sequence[RooflinePoint]) -> list[RooflinePoint]:
    """Those with a place on logarithmic axes, heaviest first."""
    return [p for p in points if p.intensity_flops_per_byte and p.attained_flops_per_s]


def _points(points: Sequence[RooflinePoint], name: str, color: str, size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [_rounded(p.intensity_flops_per_byte) for p in points],
        "y": [_rounded(p.attained_flops_per_s) for p in points],
        "text": [
            f"{plotly_text(shortened(unit_name(p.name), 40))}<br>{plotly_text(_words(p))}" for p in points
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": color, "size": size, "line": {"width": 1, "color": "var(--card)"}},
    }


def _rounded(value: float | None) -> float:
    """Four digits, more than the eye sees, for the file's size."""
    return float(f"{value or 0.0:.4g}")


def _words(point: RooflinePoint) -> str:
    bound = "" if point.bound is None else f", bound by {point.bound}"
    return (
        f"{format_count(point.executed_flops, 'FLOP')}, {format_bytes(point.moved_bytes)}, "
        f"{format_seconds(point.time_s)}{bound}"
    )


def _roofs(roof: Roofline, intensities: Sequence[float]) -> list[dict[str, Any]]:
    """min(peak, intensity x bandwidth) over the points' range and the ridge; nothing without both."""
    peak, bandwidth, ridge = (
        roof.peak_flops_per_s,
        roof.memory_bandwidth_bytes_per_s,
        roof.ridge_flops_per_byte,
    )
    if not (peak and bandwidth and ridge):
        return []
    low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    x = [low, ridge, high]  # two straight lines on logarithmic axes
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "roof",
            "x": x,
            "y": [min(peak, intensity * bandwidth) for intensity in x],
            "line": {"color": "var(--text)", "width": 2},
            "hovertemplate": "%{x:.3g} FLOP/byte: at most %{y:.3s}FLOP/s<extra></extra>",
        }
    ]


def roofline_table(view: RankView) -> Block | None:
    """Units, then the heaviest modules."""
    roof = view.result.roofline
    if roof is None:
        return None
    shown = max(3, view.detail // 15)
    rows = [*roof.units[:shown], *roof.modules[:shown]]
    kind_of = ["unit"] * len(roof.units[:shown]) + ["module"] * len(roof.modules[:shown])
    has_roof = any(point.roof_fraction is not None or point.bound for point in rows)
    return table(
        "Units and modules under the roofline" if has_roof else "Arithmetic by unit and module",
        ("name", "kind", "FLOPs", "bytes", "time", "FLOP/byte", "FLOP/s")
        + (("of the roof", "bound by") if has_roof else ()),
        (
            (
                unit_name(point.name),
                kind,
                format_count(point.executed_flops),
                format_bytes(point.moved_bytes),
                _or_dash(point.time_s, format_seconds),
                _intensity(point.intensity_flops_per_byte),
                _or_dash(point.attained_flops_per_s, format_count),
                *((_or_dash(point.roof_fraction, format_fraction), point.bound or "-") if has_roof else ()),
            )
            for point, kind in zip(rows, kind_of, strict=True)
        ),
        kinds=(MEASURED,),
        basis="units by timed steps, modules (without those inside them) by the traced step's operators",
        num_text=2,
        note=_RULE if has_roof else _BYTES,
    )


def _or_dash(value: float | None, words: Any) -> str:
    return "-" if value is None else str(words(value))


def _intensity(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:#.3g}".removesuffix(".") if value else "0"


def operators_table(view: RankView) -> Block:
    """The operators that took longest."""
    found = view.result.operators
    title = "Operators"
    if found is None:
        return Missing(name="operators", title=title, why=view.why_untraced)
    rows = found.by_operator[: max(3, view.detail // 15)]
    more = len(found.by_operator) - len(rows)
    notes = [_LAUNCH] if found.time_is_launch else []
    notes += [f"{more} more take less time"] if more else []
    return table(
        title,
        ("operator", "calls", "launch time" if found.time_is_launch else "time", "share", "FLOPs", "read", "written"),
        (_operator_cells(row) for row in rows),
        kinds=(MEASURED,),
        basis=f"{view.traced_basis}; shares are of all operators' time",
        note=f"{'; '.join(notes).capitalize()}." if notes else "",
    )  # fmt: skip


def _operator_cells(row: OperatorTotal) -> tuple[str, ...]:
    return (
        row.name,
        str(row.num_calls),
        format_seconds(row.time_s),
        format_fraction(row.time_fraction),
        format_count(row.executed_flops) if row.executed_flops else "-",
        _or_dash(row.read_bytes, format_bytes),
        _or_dash(row.written_bytes, format_bytes),
    )
