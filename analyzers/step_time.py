"""Where a step's time goes: by phase and by unit, in timed steps alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from memadvisor.analyzers.data_waits import training_waits_s
from memadvisor.analyzers.evaluation import without_evaluated_units
from memadvisor.analyzers.intervals import Intervals, length, minus, union
from memadvisor.run.records import Span, Step
from memadvisor.run.run import NUM_WARM_UP_STEPS, RankRun
from memadvisor.units import counted

_PHASE_KINDS = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """Median over steady steps of the time spent in one unit per step, all micro-batches together.

    What runs inside a unit but in another unit's span, or in its own recomputation, counts there alone.
    """

    unit: str
    forward_s: float
    backward_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The median steady step: timed, neither warm-up nor next to a traced one.

    `by_phase_s` has forward, backward, optimizer and outside, each moment counted for the innermost phase: medians,
    scaled together so that they sum to `median_s` (the parts of the median step need not be the medians of the parts). An
    update inside a backward, by a gradient's hook, is the optimizer's. Steps in which no forward was seen (memadvisor did
    not listen, to save time) have no part in the phases and units; those of `num_listened_steps` do. A recomputation
    counts as backward, as it runs there. `data_wait_s`: the part of outside that the training waits for its DataLoaders, a
    median scaled with the others; on a GPU what that stands idle meanwhile. None: not recorded, or no batch came from one
    (data_waits.py). Throughput is this rank's own. `unsteady`: of a run without a steady step, which step stands in for
    them, in words.
    """

    median_s: float
    num_steps: int
    num_listened_steps: int
    durations_s: tuple[float, ...]  # of the steady steps, in order
    by_phase_s: dict[str, float]
    units: tuple[UnitTime, ...]  # in order of first execution
    samples_per_s: float | None
    tokens_per_s: float | None
    recorder_fraction: float | None  # of the steady steps' time together, in memadvisor's own hooks
    traced_step_s: float | None  # for comparison: never part of a throughput figure
    data_wait_s: float | None = None
    unsteady: str | None = None

    @property
    def basis(self) -> str:
        """Of which steps the times are, in words."""
        if self.unsteady is not None:
            return f"of {self.unsteady}: no step was steady"
        return f"median of {counted(self.num_steps, 'steady step')}"

    @property
    def data_wait_fraction(self) -> float | None:
        """Of the median step."""
        return None if self.data_wait_s is None or not self.median_s else self.data_wait_s / self.median_s


def step_time(rank: RankRun) -> StepTime | None:
    """Break the median steady step down. None when no timed step was finished."""
    steps = rank.steady_steps()
    if not steps:
        return None
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in rank.spans:
        spans[span.step].append(span)
    median_s = median(step.duration_s for step in steps)
    seen = rank.steps_with_units()
    phases = [_phase_times(step, spans[step.index]) for step in seen]
    medians = {name: median(times[name] for times in phases) for name in phases[0]}
    scale = median_s / sum(medians.values()) if any(medians.values()) else 0.0
    waits_s = training_waits_s(rank)
    traced = rank.traced_step
    recorder = [(s.recorder_s, s.duration_s) for s in steps if s.recorder_s is not None and s.duration_s > 0]
    return StepTime(
        median_s=median_s,
        num_steps=len(steps),
        num_listened_steps=len(seen),
        durations_s=tuple(step.duration_s for step in steps),
        by_phase_s={name: scale * time_s for name, time_s in medians.items()},
        units=_unit_times(rank, seen, spans),
        samples_per_s=_rate(steps, "num_samples", median_s),
        tokens_per_s=_rate(steps, "num_tokens", median_s),
        recorder_fraction=sum(r for r, _ in recorder) / sum(d for _, d in recorder) if recorder else None,
        traced_step_s=None if traced is None else traced.duration_s,
        # A device's clock is good for half a microsecond.
        data_wait_s=None if waits_s is None else scale * min(waits_s, medians["outside"]),
        unsteady=_unsteady(rank),
    )


def _unsteady(rank: RankRun) -> str | None:
    step = rank.unsteady_step
    if step is None:
        return None
    return f"step {step.index}, {'a warm-up step' if step.index < NUM_WARM_UP_STEPS else 'next to the traced one'}"


def _phase_times(step: Step, spans: list[Span]) -> dict[str, float]:
    """Seconds of one step in each phase; a closure's forward and backward are not the optimizer's own, and an update
    that a gradient's hook makes is not the backward's."""
    moments = {kind: union((s.start_s, s.end_s) for s in spans if s.kind == kind) for kind in _PHASE_KINDS}
    backward, forward = moments["backward"], moments["forward"]
    own_forward = minus(forward, backward)
    own_optimizer = minus(minus(moments["optimizer"], backward), forward)
    updates_s = length(_updates_inside(backward, spans))
    inside = {
        "forward": length(own_forward),
        "backward": length(backward) - updates_s,
        "optimizer": length(own_optimizer) + updates_s,
    }
    return {**inside, "outside": max(0.0, step.duration_s - sum(inside.values()))}


def _updates_inside(backward: Intervals, spans: list[Span]) -> Intervals:
    """Updates during a backward; not those that have one inside, as a closure's."""
    starts = [start for start, _ in backward]
    found = []
    for span in spans:
        around = bisect_right(starts, span.start_s) - 1
        if span.kind == "optimizer" and around >= 0 and span.end_s <= backward[around][1]:
            found.append((span.start_s, span.end_s))
    return union(found)


def _unit_times(rank: RankRun, steps: tuple[Step, ...], spans: dict[int, list[Span]]) -> tuple[UnitTime, ...]:
    """Of the steps that have spans of units at all: a model of many tiny layers has them now and then."""
    steps = (
        tuple(step for step in steps if any(s.kind.startswith("unit_") for s in spans[step.index])) or steps
    )
    totals: dict[tuple[str, str, int], float] = defaultdict(float)
    names = dict.fromkeys(unit.name for unit in rank.units)
    for step in steps:
        for span, own_s in _own_times(_of_units(spans[step.index])):
            names[span.unit] = None
            totals[span.unit, span.kind, step.index] += own_s

    def median_of(unit: str, kind: str) -> float:
        return median(totals.get((unit, kind, step.index), 0.0) for step in steps)

    return tuple(
        UnitTime(
            unit=name,
            forward_s=median_of(name, "unit_forward"),
            backward_s=median_of(name, "unit_backward"),
            recompute_s=median_of(name, "unit_recompute"),
        )
        for name in names
    )


def _of_units(spans: list[Span]) -> list[Span]:
    return [span for span in without_evaluated_units(spans) if span.kind.startswith("unit_")]


def _own_times(spans: list[Span]) -> list[tuple[Span, float]]:
    """Each span with its length less the spans directly inside it."""
    own_s: list[float] = []
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    around: list[int] = []  # positions of the spans that are open, outermost first
    for span in ordered:
        while around and ordered[around[-1]].end_s <= span.start_s:
            around.pop()
        duration_s = span.end_s - span.start_s
        if around and span.end_s <= ordered[around[-1]].end_s:
            own_s[around[-1]] -= duration_s
        around.append(len(own_s))
        own_s.append(duration_s)
    return list(zip(ordered, own_s, strict=True))


def _rate(steps: tuple[Step, ...], field: str, median_s: float) -> float | None:
    """Of the steps that know their count, at the pace of them all: those that know are a little slower.

    By their median time for one of what is counted, so that of steps alike it is their count over the median step: the
    median of an even number of rates is more, the more so the more the steps' times differ.
    """
    known: list[tuple[int, float]] = [
        (getattr(s, field), s.duration_s) for s in steps if getattr(s, field) and s.duration_s > 0
    ]
    if not known or median_s <= 0:
        return None
    pace: float = median(duration_s for _, duration_s in known) / median_s
    return pace / median(duration_s / count for count, duration_s in known)
