"""What a machine's own runs teach about predicted step times: one factor for each component, near 1 where runs are few.

Each run has followed a plan on this model. Its plan is played over the plain run again, with the same costs as the plans to
come, and compared with what the run has measured. The factors are those of least

    sum over runs of ((sum_k f_k x_k - t) / t)^2 + ((f_k x_k - m_k) / t)^2 for the parts m_k that the run measured itself
    + sum_k ((f_k - 1) s / d)^2

x being predicted components, t the measured step: ridge regression towards 1, in Bayes' words with an error of s of a
step and factors that differ from 1 by d, as a rule. As the last sum is 0 where all factors are 1, the first never gets
larger; and where the error of the step times alone would, factors go back towards 1 until it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from memadvisor.analyzers.clocks import align_clocks
from memadvisor.analyzers.communication import communication
from memadvisor.analyzers.matching import match_collectives
from memadvisor.analyzers.planned_models import fingerprint_of
from memadvisor.analyzers.residuals import measured_components
from memadvisor.analyzers.segments import RecordedStep
from memadvisor.analyzers.step_time import step_time
from memadvisor.asked import NOTHING, Asked
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.simulate import simulate
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import OptimizerRate
from memadvisor.plan import Plan
from memadvisor.run.run import Run
from memadvisor.units import counted
from memadvisor.write_schedule import write_schedule

_ERROR = 0.05  # s: how far a step time is off between two runs of one plan, on a busy machine
_USUAL = 0.3  # d
_LIMITS = (0.25, 4.0)
_ROUNDS = 200
# Parts that a run tells apart in its timed steps.
_OWN_PARTS = ("recomputation", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One run: predicted components and the measured step, and what of it the run has measured itself, in seconds."""

    components_s: Mapping[str, float]
    step_time_s: float
    parts_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Factors of components that the runs told something about, and the mean error of their step times, as a fraction,
    without and with them."""

    factors: Mapping[str, float]
    num_runs: int
    error_before: float
    error_after: float


def fit(lessons: Sequence[Lesson]) -> Learnt:
    """The factors of these runs, by descent in one factor after another; the sum has one lowest place."""
    names = [
        name
        for name in dict.fromkeys(name for lesson in lessons for name in lesson.components_s)
        if any(lesson.components_s.get(name) for lesson in lessons)
    ]
    factors = dict.fromkeys(names, 1.0)
    for _ in range(_ROUNDS):
        for name in names:
            factors[name] = _best(lessons, factors, name)
    before = _error(lessons, {})
    while (after := _error(lessons, factors)) > before + 1e-12:
        factors = {name: 1 + (factor - 1) / 2 for name, factor in factors.items()}
        if all(abs(factor - 1) < 1e-6 for factor in factors.values()):
            factors = dict.fromkeys(names, 1.0)
    return Learnt(factors=factors, num_runs=len(lessons), error_before=before, error_after=after)


def _best(lessons: Sequence[Lesson], factors: Mapping[str, float], name: str) -> float:
    """Where the sum is lowest along one factor: a parabola's bottom, within the limits."""
    curvature = (_ERROR / _USUAL) ** 2
    slope = curvature
    for lesson in lessons:
        own = lesson.components_s.get(name, 0.0) / lesson.step_time_s
        others_s = sum(s * factors[other] for other, s in lesson.components_s.items() if other != name and s)
        curvature += own**2
        slope += own * (1 - others_s / lesson.step_time_s)
        if name in lesson.parts_s:
            curvature += own**2
            slope += own * lesson.parts_s[name] / lesson.step_time_s
    return min(max(slope / curvature, _LIMITS[0]), _LIMITS[1])


def _error(lessons: Sequence[Lesson], factors: Mapping[str, float]) -> float:
    """Root of the mean square of the relative errors of step times."""
    squares = [
        (sum(s * factors.get(name, 1.0) for name, s in lesson.components_s.items()) / lesson.step_time_s - 1)
        ** 2
        for lesson in lessons
    ]
    return math.sqrt(sum(squares) / len(squares))


def learn(
    plain: Run,
    runs: Sequence[Run],
    times: CollectiveTimes | None,
    transfers: TransferTimes | None,
    optimizer_rates: Sequence[OptimizerRate] = (),
) -> Learnt:
    """What runs of plans on `plain`'s model teach. Raises UsageError for one that teaches nothing about it."""

    @cache
    def recorded(asked: Asked) -> RecordedStep:
        return RecordedStep(plain, asked, optimizer_rates=optimizer_rates)

    @cache
    def captured(asked: Asked, divisor: int) -> CapturedStep:
        return recorded(asked).captured(divisor)

    lessons = []
    for run in runs:
        plan = _usable_plan(plain, run)
        divisor = _divisor(captured(NOTHING, 1), plan, run)
        asked = Asked(
            fused_updates=plan.fused_updates, chunked_loss=plan.chunked_loss, autocast=plan.autocast
        )
        step = captured(asked, divisor)
        played = simulate(step, write_schedule(plan, step.units), times, transfers=transfers)
        lessons.append(_measured(run, played.components_s))
    return fit(lessons)


def _measured(run: Run, components_s: Mapping[str, float]) -> Lesson:
    matched = match_collectives(run.ranks, align_clocks(run.ranks))
    known = [(step_time(rank), communication(rank, matched)) for rank in run.ranks]
    found = [(time, traffic) for time, traffic in known if time is not None]
    if not found:
        raise UsageError(f"{_name(run)} has no timed step.", hint="leave it out, or run it for more steps.")
    time, traffic = max(found, key=lambda pair: pair[0].median_s)
    if time.unsteady is not None:
        raise UsageError(
            f"Nothing can be learnt from {_name(run)}: its time is of {time.unsteady}, and no step was steady.",
            hint="leave it out, or run it for more steps.",
        )
    plan = run.plan
    again, has_parts = (plan.recomputed_units, bool(plan.parted_units)) if plan is not None else ((), False)
    parts = measured_components(time, traffic, again, has_parts=has_parts)
    own_s = {name: seconds for name in _OWN_PARTS if (seconds := parts.get(name))}
    return Lesson(components_s=components_s, step_time_s=time.median_s, parts_s=own_s)


def _usable_plan(plain: Run, run: Run) -> Plan:
    """Raise UsageError for a run of another machine, another number of ranks, another model, or of no full plan."""
    ours, theirs = plain.ranks[0].process, run.ranks[0].process
    plan = run.plan
    why = None
    if plan is None or plan.prediction is None:
        why = "has followed no plan of `advise`"
    elif (ours.host, ours.device_name) != (theirs.host, theirs.device_name):
        why = f"is of another machine ({theirs.host}, {theirs.device_name})"
    elif run.manifest.world_size != plain.manifest.world_size:
        why = f"is of {counted(run.manifest.world_size, 'rank')}, and this one of {plain.manifest.world_size}"
    elif plan.fingerprint != fingerprint_of(plain.ranks[0]):
        why = "is of another model"
    elif run.missing_ranks:
        why = f"lacks {len(run.missing_ranks)} of its ranks"
    if why is not None or plan is None:
        raise UsageError(
            f"Nothing can be learnt from {_name(run)}: it {why}.",
            hint="name runs that `memadvisor run --plan` made of this model on this machine.",
        )
    return plan


def _divisor(step: CapturedStep, plan: Plan, run: Run) -> int:
    """By how much the plan splits the plain run's micro-batch. Raises UsageError where it does not, or has another
    precision."""
    whole = step.micro_batch_size
    divisor = 1 if whole is None or not plan.micro_batch_size else whole // plan.micro_batch_size
    is_split = divisor >= 1 and (whole is None or divisor * (plan.micro_batch_size or whole) == whole)
    if not is_split or plan.grad_accum not in (None, step.num_micro_batches * divisor):
        raise UsageError(
            f"Nothing can be learnt from {_name(run)}: its micro-batches are no parts of this run's.",
            hint="name runs with the batch of the plain one.",
        )
    if plan.precision != step.precision:
        raise UsageError(
            f"Nothing can be learnt from {_name(run)}: it has another precision.", hint="leave it out."
        )
    return divisor


def _name(run: Run) -> str:
    return repr(str(run.path))
