"""Time of two runs: the median step by phase, every step, communication, arithmetic and operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memadvisor.analyzers.before_after import Change
from memadvisor.report.blocks import INNER, MEASURED, PREDICTED, Block, Figure, Missing, table
from memadvisor.report.difference_view import PairView
from memadvisor.report.difference_words import Form, shift_in_words, spread_in_words, texts
from memadvisor.report.downsample import highest
from memadvisor.report.lanes import bars
from memadvisor.report.words import PHASE_NAMES, color_of, seconds_scale
from memadvisor.units import counted, format_bytes, format_count, format_fraction, format_seconds

MAX_OPERATORS = 20
_NO_TIMED_STEP = "One of the runs finished no timed step."
_STEADY = "steady steps"


def step_bars(view: PairView) -> Block:
    """The median steps, divided among the phases, with a plan's predicted step between them."""
    title = "The median step, by phase"
    times = [(name, side.result.step_time) for name, side in view.sides]
    known = [(name, time) for name, time in times if time is not None]
    if len(known) < len(times):
        return Missing(name="both-steps", title=title, why=_NO_TIMED_STEP)
    compared = view.found.after.comparison
    predicted_s = None if compared is None else compared.step_time_s.predicted
    rows = [0, 1] if predicted_s is None else [0, 2]
    names = [f"{name}<br>{format_seconds(time.median_s)}" for name, time in known]
    factor, unit = seconds_scale([*(time.median_s for _, time in known), predicted_s or 0.0])
    traces = []
    for row, (_, time) in zip(rows, known, strict=True):
        reached = 0.0
        for phase, spent_s in time.by_phase_s.items():
            words = f"{PHASE_NAMES[phase]}: {format_seconds(spent_s)}"
            traces.append(_bar((reached, reached + spent_s), row, factor, color_of(phase), words))
            reached += spent_s
    if predicted_s is not None:
        names.insert(1, f"predicted<br>{format_seconds(predicted_s)}")
        bar = _bar((0.0, predicted_s), 1, factor, "var(--card)", f"predicted: {format_seconds(predicted_s)}")
        bar["marker"] = {
            "color": "var(--card)",
            "line": {"width": 1, "color": "var(--dim)"},
            "pattern": {"shape": "/", "size": 5, "fgcolor": "var(--dim)", "bgcolor": "var(--card)"},
        }
        traces.append(bar)
    return Figure(
        name="both-steps",
        title=title,
        kinds=(MEASURED,) if predicted_s is None else (MEASURED, PREDICTED),
        basis=f"{_STEADY}{view.of_rank}",
        label=", ".join(name.replace("<br>", " ") for name in names),
        traces=traces,
        layout={
            "xaxis": {"title": {"text": f"time ({unit})"}, "rangemode": "tozero"},
            "yaxis": {
                "tickvals": list(range(len(names))),
                "ticktext": names,
                "range": [len(names) - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "barmode": "overlay",
            "hovermode": "closest",
            "showlegend": False,
        },
        height_px=80 + 52 * len(names),
        legend=[(PHASE_NAMES[phase], color_of(phase)) for phase in known[0][1].by_phase_s],
        note=_said(view),
    )


def _bar(stretch: tuple[float, float], row: int, factor: float, color: str, words: str) -> dict[str, Any]:
    return bars([stretch], rows=[row], heights=[0.7], factor=factor, colors=color, hovers=[words], more={})


def _said(view: PairView) -> str:
    """Whether the difference is more than noise."""
    told, spread = shift_in_words(view.rank.step_time), spread_in_words(view.rank.step_time)
    about = (
        ""
        if told is None
        else f"{told.said[0].upper()}{told.said[1:]}{f': {told.about}' if told.about else ''} ({told.test})."
    )
    return f"{about} {spread[:1].upper()}{spread[1:]}{'.' if spread else ''}".strip()


def step_table(view: PairView) -> Block:
    time = view.rank.step_time
    rows: list[tuple[str, Change[Any], Form]] = [("median step", time.median_s, format_seconds)]
    rows += [
        (f"{INNER}{PHASE_NAMES[name]}", change, format_seconds) for name, change in time.by_phase_s.items()
    ]
    rows += [
        (f"{INNER}of it waiting for data", time.data_wait_s, format_seconds),
        ("tokens/s, all ranks", view.found.tokens_per_s, format_count),
        ("samples/s, all ranks", view.found.samples_per_s, format_count),
    ]
    return _figures("The step in figures", rows, f"{_STEADY}{view.of_rank}")


def _figures(title: str, rows: list[tuple[str, Change[Any], Form]], basis: str, note: str = "") -> Block:
    """What neither run recorded has no row; of parts, what is 0 in both has none either."""
    shown = [
        (name, *texts(change, form))
        for name, change, form in rows
        if not (change.before is None and change.after is None)
        and (change.before or change.after or not name.startswith(INNER))
    ]
    if not shown:
        return Missing(name="both-figures", title=title, why="Neither run recorded any of it.")
    return table(
        title, ("", "before", "after", "difference", ""), shown, kinds=(MEASURED,), basis=basis, note=note
    )


def each_step(view: PairView) -> Block | None:
    """The durations of both runs' steps, which show how noisy each is."""
    sides = [(name, side.recorded.steps, side) for name, side in view.sides]
    if not all(steps for _, steps, _ in sides):
        return None
    factor, unit = seconds_scale(step.duration_s for _, steps, _ in sides for step in steps)
    return Figure(
        name="both-every-step",
        title="Every step of both",
        kinds=(MEASURED,),
        basis=f"{' and '.join(counted(len(steps), 'step') for _, steps, _ in sides)}{view.of_rank}",
        label="Durations of all steps, before and after.",
        traces=list(_marks(view, factor, unit)),
        layout={
            "xaxis": {"title": {"text": "step"}, "zeroline": False, "tickformat": "d"},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "hovermode": "closest",
        },
        height_px=280,
        note="Hollow: warm-up, traced, or next to a traced one, and in no median.",
    )


def _marks(view: PairView, factor: float, unit: str) -> Iterator[dict[str, Any]]:
    looks = (("square", "var(--dim)"), ("circle", "var(--forward)"))
    for (name, side), (symbol, color) in zip(view.sides, looks, strict=True):
        steps = side.recorded.steps
        steady = {step.index for step in side.recorded.steady_steps()}
        shown = [
            steps[position] for position in highest([step.duration_s for step in steps], 2 * side.detail)
        ]
        for is_steady in (True, False):
            members = [step for step in shown if (step.index in steady) == is_steady]
            if members:
                yield {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name if is_steady else f"{name}, not steady",
                    "legendgroup": name,
                    "x": [step.index for step in members],
                    "y": [step.duration_s / factor for step in members],
                    "marker": {
                        "color": color,
                        "symbol": symbol if is_steady else f"{symbol}-open",
                        "size": 7,
                    },
                    "hovertemplate": f"{name}, step %{{x}}: %{{y:.3~g}} {unit}<extra></extra>",
                }


def communication_table(view: PairView) -> Block:
    rank = view.rank
    title = "Communication in figures"
    if not (rank.num_collectives.before or rank.num_collectives.after):
        why = "Neither run's traced step has a collective of this rank."
        return Missing(name="both-communication", title=title, why=why, absence="None.")
    words = {"time_s": "time", "exposed_s": "exposed", "waiting_s": "waiting for other ranks"}
    rows: list[tuple[str, Change[Any], Form]] = [
        ("bytes", rank.communication_bytes, format_bytes),
        ("operations", rank.num_collectives, str),
        *(
            (f"{'' if name == 'time_s' else INNER}{words.get(name, name)}", change, format_seconds)
            for name, change in rank.communication_s.items()
        ),
        ("exposed, of the traced step", rank.exposed_fraction, format_fraction),
    ]
    note = "Times carry the tracing's cost; exposed is what no operator ran beside."
    return _figures(title, rows, view.traced_basis, note)


def arithmetic_table(view: PairView) -> Block:
    rank = view.rank

    def flops(value: float) -> str:
        return format_count(value, "FLOP")

    rows: list[tuple[str, Change[Any], Form]] = [
        ("MFU", rank.mfu, format_fraction),
        ("HFU", rank.hfu, format_fraction),
        ("needed by the model", rank.model_flops_per_step, flops),
        ("executed", rank.executed_flops_per_step, flops),
    ]
    return _figures("Arithmetic of a step", rows, view.traced_basis)


def operator_table(view: PairView) -> Block | None:
    found = view.rank.operators
    if not found:
        return None
    more = len(found) - MAX_OPERATORS
    return table(
        "Operators that differ most",
        ("operator", "calls before", "after", "time before", "after", "difference"),
        (
            (
                row.name.removeprefix("aten::"),
                str(row.num_calls.before),
                str(row.num_calls.after),
                *texts(row.time_s, format_seconds)[:3],
            )
            for row in found[:MAX_OPERATORS]
        ),
        kinds=(MEASURED,),
        basis=view.traced_basis,
        note="One traced step each, so times differ by chance, too."
        + (f" {more} more are left out." if more > 0 else ""),
    )
