"""The process's and the device's own counters over the whole run."""

from __future__ import annotations

from memadvisor.report.blocks import MEASURED, Block, Figure, Missing
from memadvisor.report.downsample import highest, packed
from memadvisor.report.view import RankView
from memadvisor.report.words import bytes_scale, seconds_scale
from memadvisor.run.records import Counter
from memadvisor.units import counted, format_bytes

_ENDS_EARLY = " On a CPU the allocator is asked until the traced step has ended: asking slows it."
_SERIES = (
    ("resident_bytes", "process, resident", "var(--dim)", "dot"),
    ("device_used_bytes", "device, all processes", "var(--optimizer-state)", "dashdot"),
    ("reserved_bytes", "allocator, reserved", "var(--gradient)", "dash"),
    ("allocated_bytes", "allocator, allocated", "var(--activation)", "solid"),
)


def counters_over_run(view: RankView) -> Block:
    """Samples of memory counters from the run's first to its last."""
    title = "Memory counters over the run"
    samples = view.recorded.counters
    lines = [(name, color, dash, _points(samples, field)) for field, name, color, dash in _SERIES]
    lines = [line for line in lines if line[3]]
    if not lines:
        return Missing(name="counters", title=title, why="No counter of memory was sampled.")
    factor, unit = bytes_scale(size for *_, points in lines for _, size in points)
    start_s = min(sample.time_s for sample in samples)
    time_factor, time_unit = seconds_scale([samples[-1].time_s - start_s])
    traces = []
    for name, color, dash, points in lines:
        kept = highest([size for _, size in points], 4 * view.detail)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) < 60 else "lines",
                "name": name,
                "x": packed([(points[i][0] - start_s) / time_factor for i in kept]),
                "y": packed([points[i][1] / factor for i in kept]),
                "line": {"color": color, "dash": dash, "width": 1.8},
                "marker": {"size": 5},
                "hovertemplate": f"{name}: %{{y:,.2f}} {unit}<extra></extra>",
            }
        )
    largest = max(size for *_, points in lines for _, size in points)
    return Figure(
        name="counters",
        title=title,
        kinds=(MEASURED,),
        basis=f"{counted(len(samples), 'sample')}{view.of_rank}",
        label=f"Memory counters over the run, at most {format_bytes(largest)}.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": f"time since the first sample ({time_unit})"}, "zeroline": False},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "hovermode": "x",
            "showlegend": True,
        },
        height_px=270,
        note="The resident memory of the process holds the interpreter and libraries too."
        + (_ENDS_EARLY if _ends_early(samples) else ""),
    )


def _ends_early(samples: tuple[Counter, ...]) -> bool:
    known = [sample.time_s for sample in samples if sample.allocated_bytes is not None]
    return bool(known) and known[-1] < samples[-1].time_s


def _points(samples: tuple[Counter, ...], field: str) -> list[tuple[float, float]]:
    return [(sample.time_s, size) for sample in samples if (size := getattr(sample, field)) is not None]
