"""Where the time went: the median step by phase, by unit, and every step of the run."""

from __future__ import annotations

from typing import Any

from memadvisor.analyzers.evaluation import Evaluation
from memadvisor.analyzers.step_time import StepTime
from memadvisor.report.blocks import MEASURED, PREDICTED, Block, Figure, Missing
from memadvisor.report.data_waits import waits_in_words
from memadvisor.report.downsample import highest
from memadvisor.report.escape import plotly_text, shortened
from memadvisor.report.lanes import bars
from memadvisor.report.view import RankView
from memadvisor.report.words import PHASE_NAMES, color_of, seconds_scale, unit_name
from memadvisor.units import counted, format_fraction, format_seconds

MAX_UNITS = 60
_MOST_NAMED_STEPS = 12  # up to so many each has its number: plotly would name halves of a step, rounded
_NO_TIMED_STEP = "No timed step was finished."


def _basis(time: StepTime, view: RankView) -> str:
    of_all = (
        ""
        if time.num_listened_steps == time.num_steps
        else f" (its parts: {time.num_listened_steps} of them)"
    )
    return f"{time.basis}{of_all}{view.of_rank}"


def step_waterfall(view: RankView) -> Block:
    """Phases one after another, adding up to the median step; a plan's predicted step beside it."""
    title = "The median step, by phase"
    time = view.result.step_time
    if time is None:
        return Missing(name="waterfall", title=title, why=_NO_TIMED_STEP)
    compared = view.analysis.comparison
    predicted_s = None if compared is None else compared.step_time_s.predicted
    factor, unit = seconds_scale([time.median_s, predicted_s or 0.0])
    traces = [_waterfall(time, factor)]
    # Beside their names: at the end of a bar they would leave a narrow page.
    names = [
        *(f"{PHASE_NAMES[phase]}<br>{_share(s, time)}" for phase, s in time.by_phase_s.items()),
        f"step, measured<br>{format_seconds(time.median_s)}",
    ]
    if predicted_s is not None:
        names.append(f"step, predicted<br>{format_seconds(predicted_s)}")
        traces.append(_predicted_step(predicted_s, len(names) - 1, factor))
    return Figure(
        name="waterfall",
        title=title,
        kinds=(MEASURED,) if predicted_s is None else (MEASURED, PREDICTED),
        basis=_basis(time, view),
        label=f"Step time {format_seconds(time.median_s)}: "
        + ", ".join(f"{name} {format_seconds(spent)}" for name, spent in time.by_phase_s.items()),
        traces=traces,
        layout={
            "xaxis": {
                "title": {"text": f"time ({unit})"},
                "range": [0, 1.02 * max(time.median_s, predicted_s or 0.0) / factor],
            },
            "yaxis": {
                "tickvals": list(range(len(names))),
                "ticktext": names,
                "range": [len(names) - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
            },
            "barmode": "overlay",
            "hovermode": "closest",
            "showlegend": False,
        },
        height_px=90 + 42 * len(names),
        note="Recomputation runs inside the backward and counts there. Outside is what is in no model's forward, "
        "no backward and no optimizer step: data loading, logging, waiting."
        f"{_waiting(view)}"
        + (f" Of the timed steps: {seen}." if (seen := evaluation_in_words(view.result.evaluation)) else ""),
    )


def _waiting(view: RankView) -> str:
    """Where something is recorded of it: twenty ranks of a script without a loader are a long page as it is."""
    time, waits = view.result.step_time, view.result.data_waits
    return "" if time is None or waits is None else f" Of a step: {'; '.join(waits_in_words(time, waits))}."


def evaluation_in_words(found: Evaluation | None) -> str:
    """`12 model calls without gradients in 3 steps took 84.0 ms, part of outside`; "" where there is nothing to say."""
    if found is None:
        return ""
    unseen = found.num_unseen_steps
    hidden = f"{unseen} step{'s' if unseen != 1 else ''} did not record such calls" if unseen else ""
    if not found.num_calls:
        return f"no model call without gradients was seen, and {hidden}" if hidden else ""
    calls = f"{found.num_calls} model call{'s' if found.num_calls != 1 else ''} without gradients"
    steps = f"{found.num_steps} step{'s' if found.num_steps != 1 else ''}"
    took = f"{calls} in {steps} took {format_seconds(found.time_s)}, part of outside"
    return f"{took} ({hidden})" if hidden else took


def _waterfall(time: StepTime, factor: float) -> dict[str, Any]:
    stretches, reached = [], 0.0
    for spent_s in time.by_phase_s.values():
        stretches.append((reached, reached + spent_s))
        reached += spent_s
    words = [*(_share(spent_s, time) for spent_s in time.by_phase_s.values()), format_seconds(time.median_s)]
    num_rows = len(words)
    return bars(
        [*stretches, (0.0, time.median_s)],
        rows=range(num_rows),
        heights=[0.66] * num_rows,
        factor=factor,
        colors=[*(color_of(phase) for phase in time.by_phase_s), "var(--dim)"],
        hovers=words,
        more={},
    )


def _share(spent_s: float, time: StepTime) -> str:
    share = spent_s / time.median_s if time.median_s else None
    return f"{format_seconds(spent_s)} · {format_fraction(share)}"


def _predicted_step(predicted_s: float, row: int, factor: float) -> dict[str, Any]:
    trace = bars(
        [(0.0, predicted_s)],
        rows=[row],
        heights=[0.66],
        factor=factor,
        colors="var(--card)",
        hovers=[f"predicted {format_seconds(predicted_s)}"],
        more={},
    )
    trace["marker"]["line"] = {"width": 2, "color": "var(--optimizer-state)"}
    trace["marker"]["pattern"] = {"shape": "/", "fgcolor": "var(--optimizer-state)", "size": 6}
    return trace


def unit_times(view: RankView) -> Block:
    """Forward, backward and recomputation of each unit, in order of first execution."""
    title = "Forward and backward, by unit"
    time = view.result.step_time
    if time is None:
        return Missing(name="units", title=title, why=_NO_TIMED_STEP)
    timed = [row for row in time.units if row.forward_s or row.backward_s or row.recompute_s]
    if not timed:
        return Missing(
            name="units", title=title, why="No unit's forward or backward was seen in a timed step."
        )
    longest = sorted(timed, key=lambda row: -(row.forward_s + row.backward_s + row.recompute_s))
    chosen = {row.unit for row in longest[:MAX_UNITS]}
    rows = [row for row in timed if row.unit in chosen]
    factor, unit = seconds_scale(row.forward_s + row.backward_s for row in rows)
    series = {
        phase: [getattr(row, f"{phase}_s") for row in rows] for phase in ("forward", "backward", "recompute")
    }
    more = len(timed) - len(rows)
    return Figure(
        name="units",
        title=title,
        kinds=(MEASURED,),
        basis=_basis(time, view),
        label=f"Stacked bars of {counted(len(rows), 'unit')}; the longest is {unit_name(longest[0].unit)}.",
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "name": PHASE_NAMES[phase],
                "x": [value / factor for value in values],
                "y": list(range(len(rows))),
                "marker": {"color": color_of(phase)},
                "hovertext": [
                    plotly_text(f"{PHASE_NAMES[phase]} of {unit_name(row.unit)}: {format_seconds(value)}")
                    for row, value in zip(rows, values, strict=True)
                ],
                "hoverinfo": "text",
            }
            for phase, values in series.items()
            if any(values)
        ],
        layout={
            "xaxis": {"title": {"text": f"per step ({unit})"}, "rangemode": "tozero"},
            "yaxis": {
                "tickvals": list(range(len(rows))),
                "ticktext": [plotly_text(shortened(unit_name(row.unit))) for row in rows],
                "range": [len(rows) - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
            },
            "barmode": "stack",
            "bargap": 0.25,
            "hovermode": "closest",
        },
        height_px=max(180, 100 + 21 * len(rows)),
        note="All micro-batches of a step together; time inside another unit counts there alone."
        + (f" {more} shorter units are left out." if more else ""),
    )


def every_step(view: RankView) -> Block:
    """Duration of each step: warm-up, steady, traced."""
    title = "Every step"
    steps = view.recorded.steps
    if not steps:
        return Missing(name="steps", title=title, why="No step was finished.")
    steady = {step.index for step in view.recorded.steady_steps()}
    kept = set(highest([step.duration_s for step in steps], 4 * view.detail))
    shown = [step for position, step in enumerate(steps) if position in kept or step.traced]
    factor, unit = seconds_scale(step.duration_s for step in shown)
    groups = (
        ("steady: in the median", "var(--forward)", "circle", [s for s in shown if s.index in steady]),
        (
            "warm-up or next to a traced one: not in it",
            "var(--dim)",
            "circle-open",
            [s for s in shown if s.index not in steady and not s.traced],
        ),
        ("traced: in no throughput figure", "var(--backward)", "diamond", [s for s in shown if s.traced]),
    )
    left_out = len(steps) - len(shown)
    return Figure(
        name="steps",
        title=title,
        kinds=(MEASURED,),
        basis=f"{counted(len(steps), 'step')}{view.of_rank}",
        label=f"Duration of each of {counted(len(steps), 'step')}.",
        traces=[
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [step.index for step in members],
                "y": [step.duration_s / factor for step in members],
                "marker": {"color": color, "symbol": symbol, "size": 7},
                "hovertemplate": f"step %{{x}}: %{{y:.3~g}} {unit}<extra></extra>",
            }
            for name, color, symbol, members in groups
            if members
        ],
        layout={
            "xaxis": {"title": {"text": "step"}, "zeroline": False, "tickformat": "d"}
            | ({"dtick": 1} if len(steps) <= _MOST_NAMED_STEPS else {}),
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "hovermode": "closest",
        },
        height_px=270,
        note=f"Of {len(steps)} steps the slowest of each stretch are drawn." if left_out else "",
    )
