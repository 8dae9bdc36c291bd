"""A plan's lanes as they were predicted, and what this run measured of them: one step, on one axis of time.

Three clocks stand beside each other and are never mixed. What was predicted is of a steady step. Compute is measured of the
timed step whose time is nearest to the median. Collectives, and transfers to and from a disk, are seen in the traced step
alone, which takes longer; so its compute is there again, to read them by. Of a pipeline each rank has a row of its own: the passes of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.comparison import Compared, Comparison
from memadvisor.analyzers.evaluation import without_evaluated_units
from memadvisor.analyzers.sides import started_s, traced_collectives
from memadvisor.cost.places import place_in
from memadvisor.cost.timeline import joined, kind_word
from memadvisor.plan import LaneInterval, Plan
from memadvisor.run.records import Span, Step
from memadvisor.run.run import RankRun
from memadvisor.schedule import Lane
from memadvisor.units import format_bytes

PREDICTED = "predicted"
_OUTSIDE = place_in("outside", None)
_LEARNT = 0.005  # of the step: less is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """A lane by one clock, which `basis` names. `intervals` None: not measured, for the reason `why`. `step_s`: of the whole
    step by that clock. `rank`: whose passes they are, of a pipeline; else None."""

    lane: str
    basis: str
    intervals: tuple[LaneInterval, ...] | None
    step_s: float
    why: str = ""
    rank: int | None = None

    @property
    def is_predicted(self) -> bool:
        return self.basis == PREDICTED


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLanes:
    """Rows of one rank, by lane, or of all ranks of a pipeline (`rank` None), the predicted one of each first; what step and
    exposed communication took, the latter of one rank alone.

    `unlearnt_s`: where the lanes end as they were played, if earlier runs have taught that the step takes another time.
    """

    rank: int | None
    rows: tuple[LaneRow, ...]
    step_time_s: Compared
    exposed_communication_s: Compared
    unlearnt_s: float | None = None

    @property
    def longest_s(self) -> float:
        ends = (each.end_s for row in self.rows for each in row.intervals or ())
        return max([*ends, *(row.step_s for row in self.rows)], default=0.0)


def planned_lanes(analysis: Analysis) -> PlannedLanes | None:
    """Of the slowest rank, which the comparison is of too. None without a plan that tells its lanes, or without a step."""
    plan, compared = analysis.run.plan, analysis.comparison
    if plan is not None and any(own.timeline is not None for own in plan.ranks):
        return _stage_lanes(analysis, plan)
    if plan is None or plan.timeline is None or plan.prediction is None or compared is None:
        return None
    timed = [
        (result.step_time.median_s, recorded)
        for recorded, result in zip(analysis.run.ranks, analysis.ranks, strict=True)
        if result.step_time is not None
    ]
    if not timed:
        return None
    median_s, rank = max(timed, key=lambda pair: pair[0])
    ended_s = max((each.end_s for each in plan.timeline if each.lane == Lane.COMPUTE), default=0.0)
    step_s = plan.prediction.step_time_s
    return PlannedLanes(
        rank=rank.process.rank,
        rows=tuple(_rows(plan.timeline, ended_s, rank, median_s)),
        step_time_s=compared.step_time_s,
        exposed_communication_s=_exposed(compared, plan.prediction.exposed_communication_s),
        unlearnt_s=ended_s if abs(step_s - ended_s) > _LEARNT * step_s else None,
    )


def _stage_lanes(analysis: Analysis, plan: Plan) -> PlannedLanes | None:
    """Every rank's passes, above those of a timed step of its own."""
    compared, times = analysis.comparison, {rank.rank: rank.step_time for rank in analysis.ranks}
    if compared is None or plan.prediction is None:
        return None
    step_s, recorded = plan.prediction.step_time_s, {rank.process.rank: rank for rank in analysis.run.ranks}
    rows = []
    for own in plan.ranks:
        rank, time = recorded.get(own.rank), times.get(own.rank)
        if own.timeline is None or rank is None or time is None:
            continue
        compute = Lane.COMPUTE.value
        rows.append(
            LaneRow(lane=compute, basis=PREDICTED, intervals=own.timeline, step_s=step_s, rank=own.rank)
        )
        step = _typical_step(rank, time.median_s)
        passes = tuple(_passes(rank, step, own.timeline))
        basis = f"measured, step {step.index}"
        rows.append(
            LaneRow(lane=compute, basis=basis, intervals=passes, step_s=step.duration_s, rank=own.rank)
        )
    nothing = Compared(predicted=None, measured=None)
    return (
        PlannedLanes(
            rank=None, rows=tuple(rows), step_time_s=compared.step_time_s, exposed_communication_s=nothing
        )
        if rows
        else None
    )


def _passes(rank: RankRun, step: Step, predicted: Sequence[LaneInterval]) -> Iterator[LaneInterval]:
    """Forwards and backwards of a step, named as the predicted ones of the same place in the order of their kind."""
    spans = [span for span in rank.spans if span.step == step.index]
    for kind in ("forward", "backward", "optimizer"):
        own = sorted((span for span in spans if span.kind == kind), key=lambda span: span.start_s)
        names = [each.label for each in predicted if kind_word(each.label) == kind]
        labels = names if len(names) == len(own) else [place_in(kind, None)] * len(own)
        for span, label in zip(own, labels, strict=True):
            start_s, end_s = span.start_s - step.start_s, span.end_s - step.start_s
            yield LaneInterval(Lane.COMPUTE.value, label, start_s, end_s)


def _typical_step(rank: RankRun, median_s: float) -> Step:
    return min(rank.steps_with_units(), key=lambda each: abs(each.duration_s - median_s))


def _exposed(compared: Comparison, predicted_s: float) -> Compared:
    pair = compared.components_s.get("exposed_communication")
    return Compared(predicted=predicted_s, measured=None if pair is None else pair.measured)


def _rows(
    timeline: Sequence[LaneInterval], ended_s: float, rank: RankRun, median_s: float
) -> Iterator[LaneRow]:
    traced = rank.traced_step
    seen = () if traced is None else (*_collectives(rank, traced), *_transfers(rank, traced))
    for lane in Lane:
        predicted = tuple(each for each in timeline if each.lane == lane)
        own = [each for each in seen if each.lane == lane]
        if predicted or own:
            yield LaneRow(lane=lane, basis=PREDICTED, intervals=predicted, step_s=ended_s)
        if lane is Lane.COMPUTE:
            step = _typical_step(rank, median_s)
            yield _compute_row(rank, step, f"measured, step {step.index}")
            if traced is not None and seen:
                yield _compute_row(rank, traced, _of_trace(traced))
        elif traced is not None and own:
            yield _row(lane, _of_trace(traced), own, traced)
        elif predicted:
            why = _why_not_seen(lane, traced)
            yield LaneRow(lane=lane, basis="measured", intervals=None, step_s=0.0, why=why)


def _of_trace(step: Step) -> str:
    return f"measured, traced step {step.index}"


def _why_not_seen(lane: Lane, traced: Step | None) -> str:
    if lane is not Lane.COLLECTIVE:
        return f"what the {lane} transfers is not recorded"
    return (
        "no step was traced"
        if traced is None
        else f"the traced step {traced.index} shows no collective's end"
    )


def _compute_row(rank: RankRun, step: Step, basis: str) -> LaneRow:
    spans = without_evaluated_units([span for span in rank.spans if span.step == step.index])
    pieces = (
        LaneInterval(Lane.COMPUTE.value, label, start_s - step.start_s, end_s - step.start_s)
        for label, start_s, end_s in _innermost(spans, step)
    )
    return _row(Lane.COMPUTE, basis, pieces, step)


def _row(lane: Lane, basis: str, intervals: Iterable[LaneInterval], step: Step) -> LaneRow:
    drawn = tuple(joined(intervals, step.duration_s))
    return LaneRow(lane=lane, basis=basis, intervals=drawn, step_s=step.duration_s)


def _innermost(spans: Iterable[Span], step: Step) -> Iterator[tuple[str, float, float]]:
    """The step from its start to its end: each moment under the innermost span that it is in."""
    reached_s = step.start_s
    around: list[Span] = []

    def until(moment_s: float) -> Iterator[tuple[str, float, float]]:
        nonlocal reached_s
        if moment_s > reached_s:
            yield _label(around[-1]) if around else _OUTSIDE, reached_s, moment_s
            reached_s = moment_s

    for span in sorted(spans, key=lambda each: (each.start_s, -each.end_s)):
        while around and around[-1].end_s <= span.start_s:
            yield from until(around[-1].end_s)
            around.pop()
        yield from until(span.start_s)
        around.append(span)
    while around:
        yield from until(around[-1].end_s)
        around.pop()
    yield from until(step.end_s)


def _label(span: Span) -> str:
    """In the words of a prediction."""
    is_unit = span.kind.startswith("unit_")
    phase = span.kind.removeprefix("unit_")
    if phase == "recompute":
        return f"recomputation of {span.unit}"
    return "evaluation" if phase == "evaluation" else place_in(phase, span.unit if is_unit else None)


def _collectives(rank: RankRun, step: Step) -> tuple[LaneInterval, ...]:
    """Of the traced step, those whose end was seen."""
    return tuple(
        LaneInterval(
            Lane.COLLECTIVE.value,
            f"{call.operation}{f' of {call.unit}' if call.unit else ''}",
            max(0.0, started_s(call) - step.start_s),
            call.end_s - step.start_s,
        )
        for call in traced_collectives(rank)
        if call.end_s is not None
    )


def _transfers(rank: RankRun, step: Step) -> tuple[LaneInterval, ...]:
    """Of the traced step, those that ended in it."""
    return tuple(
        LaneInterval(
            each.lane,
            f"{each.kind} of {format_bytes(each.size_bytes)}",
            max(0.0, each.start_s - step.start_s),
            each.end_s - step.start_s,
        )
        for each in rank.transfers
        if each.step == step.index and each.end_s > step.start_s
    )
