"""What a plan promised beside what the run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memadvisor.analyzers.communication import Communication
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.residuals import comparable, measured_components
from memadvisor.analyzers.step_time import StepTime
from memadvisor.plan import PlainRun, Plan, Prediction
from memadvisor.run.records import CATEGORIES, UNEXPLAINED
from memadvisor.units import counted, format_seconds

# So many times as long as predicted, or that share of it, both of what the plan leaves to run as it ran: beyond it the
# machine was another.
_OTHER_SPEED = 1.25
# Waiting for ranks that came late is named from that share of the exposed communication, and of the step, on.
_LATE_OF_EXPOSED, _LATE_OF_STEP = 0.5, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A predicted and a measured figure; `error_fraction` is (predicted - measured) / measured."""

    predicted: float | None
    measured: float | None

    @property
    def error_fraction(self) -> float | None:
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured

    @property
    def differs(self) -> bool:
        """Whether both are known, and are not the same."""
        return self.differing is not None

    @property
    def differing(self) -> tuple[float, float] | None:
        """Predicted and measured, where both are known, and are not the same."""
        if self.predicted is None or self.measured is None or self.predicted == self.measured:
            return None
        return self.predicted, self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plan's prediction beside the largest rank's peak and the slowest rank's median step.

    `by_category_bytes` is at the peak, and has `unexplained` where either side does. `reserved_bytes`: what a CUDA
    allocator reserved; where both sides know it, the budget holds that, else the peak. `components_s`: parts of the step
    time, of the slowest rank (residuals.py); empty for plans that do not say what their prediction is made of.
    `rank_peak_bytes`: of a plan with choices by rank, each rank's peak. `micro_batch_size`: samples of one, and
    `num_micro_batches` of a step, of the plan and of the traced step, which the user sets. `unsteady`: of a run without a
    steady step, which step the measured time is of, in words. `plain`: what the run without the plan measured, where the
    plan tells. `late_s`: how much of the exposed communication, as measured, waited for a rank that came later.
    """

    peak_bytes: Compared
    reserved_bytes: Compared
    step_time_s: Compared
    by_category_bytes: dict[str, Compared]
    peak_position: tuple[str, str | None]  # predicted, measured
    budget_bytes: int | None
    within_budget: bool | None
    components_s: dict[str, Compared] = field(default_factory=dict)
    rank_peak_bytes: dict[int, Compared] = field(default_factory=dict)
    micro_batch_size: Compared = Compared(predicted=None, measured=None)
    num_micro_batches: Compared = Compared(predicted=None, measured=None)
    unsteady: str | None = None
    plain: PlainRun | None = None
    late_s: float | None = None

    @property
    def shown_by_category_bytes(self) -> dict[str, Compared]:
        """Without what is nothing on both sides; that nothing is unexplained is worth a row."""
        return {
            name: pair
            for name, pair in self.by_category_bytes.items()
            if pair.predicted or pair.measured or name == UNEXPLAINED
        }

    @property
    def unsteady_in_words(self) -> str | None:
        """In words, where the measured time is of no step that the prediction is of."""
        if self.unsteady is None or self.step_time_s.predicted is None:
            return None
        return (
            f"The step time is predicted of a steady step, and measured of {self.unsteady}: no step was steady. "
            "Let it run for more steps to compare them."
        )

    @property
    def other_speed(self) -> str | None:
        """In words, where compute and the optimizer both were slower, or both faster, than in the run that was planned
        from: what the plan adds to a step stands beside them."""
        pairs = [self.components_s.get(name) for name in ("compute", "optimizer")]
        times = [
            pair.measured / pair.predicted for pair in pairs if pair and pair.measured and pair.predicted
        ]
        if len(times) < len(pairs):
            return None
        if min(times) < _OTHER_SPEED and max(times) > 1 / _OTHER_SPEED:
            return None
        how = "slower or busier" if min(times) >= _OTHER_SPEED else "faster or less busy"
        return (
            f"Compute took {times[0]:.2g} times as long as predicted, and the optimizer {times[1]:.2g}: most likely the machine "
            f"was {how} than when the plan's run was recorded. The peak compares; to compare times, profile both again."
        )

    @property
    def late_ranks(self) -> str | None:
        """In words, where exposed communication is above what was predicted since ranks waited for each other."""
        exposed, late_s = self.components_s.get("exposed_communication"), self.late_s
        if exposed is None or exposed.predicted is None or not exposed.measured or late_s is None:
            return None
        has_most = late_s >= _LATE_OF_EXPOSED * exposed.measured
        is_much = late_s >= _LATE_OF_STEP * (self.step_time_s.measured or 0.0)
        if exposed.measured <= exposed.predicted or not has_most or not is_much:
            return None
        return (
            f"Of the exposed communication {format_seconds(late_s)} waited for a rank that came later, and "
            f"{format_seconds(exposed.measured - late_s)} were messages; a prediction has ranks come together, but for what a "
            "calibration has measured."
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why figures of the two do not compare, in words; none where they do."""
        said = (self.other_micro_batch, self.unsteady_in_words, self.other_speed, self.late_ranks)
        return tuple(each for each in said if each is not None)

    @property
    def other_micro_batch(self) -> str | None:
        """In words, where the step was not as the plan has it; then its figures are of another step too."""
        size, number = self.micro_batch_size.differing, self.num_micro_batches.differing
        words, whose = [], "The plan's" if size is None else "Its"
        if size is not None:
            words.append(
                f"The plan is for micro-batches of {counted(size[0], 'sample')}, and the traced step had {size[1]:.0f}: "
                f"set {size[0]:.0f} in the script."
            )
        if number is not None:
            words.append(
                f"{whose} steps have {counted(number[0], 'micro-batch')}, and the traced one had "
                f"{counted(number[1], 'micro-batch')}: let the script "
                f"accumulate gradients over {number[0]:.0f}, or step times are of different steps."
            )
        return " ".join(words) or None


def comparison(
    plan: Plan | None,
    peaks: Sequence[PeakBreakdown | None],
    times: Sequence[StepTime | None],
    traffics: Sequence[Communication | None] = (),
    ranks: Sequence[int] = (),
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
) -> Comparison | None:
    """Put prediction beside measurement. None without a plan that predicts. `traffics`, `ranks`: of those of `times`.
    `micro_batch_size`, `num_micro_batches`: of the traced step."""
    if plan is None or plan.prediction is None:
        return None
    predicted = plan.prediction
    peak = max((p for p in peaks if p is not None), key=lambda p: p.allocated_bytes, default=None)
    slowest = max((time for time in times if time is not None), key=lambda t: t.median_s, default=None)
    reserved_bytes = max(
        (p.reserved_bytes for p in peaks if p is not None and p.reserved_bytes is not None), default=None
    )
    known = [(time, traffic) for time, traffic in zip(times, traffics, strict=False) if time is not None]
    seen = max(known, key=lambda pair: pair[0].median_s, default=None)
    needed_bytes = None if peak is None else peak.allocated_bytes
    if predicted.reserved_bytes is not None and reserved_bytes is not None:
        needed_bytes = reserved_bytes
    measured = {} if peak is None else {**peak.by_category_bytes, UNEXPLAINED: peak.unexplained_bytes}
    names = (*CATEGORIES, UNEXPLAINED)
    return Comparison(
        peak_bytes=Compared(
            predicted=predicted.peak_bytes, measured=None if peak is None else peak.allocated_bytes
        ),
        reserved_bytes=Compared(predicted=predicted.reserved_bytes, measured=reserved_bytes),
        step_time_s=Compared(
            predicted=predicted.step_time_s, measured=None if slowest is None else slowest.median_s
        ),
        by_category_bytes={
            name: Compared(predicted=predicted.by_category_bytes.get(name), measured=measured.get(name))
            for name in names
            if predicted.by_category_bytes.get(name) is not None or measured.get(name) is not None
        },
        peak_position=(predicted.peak_position, None if peak is None else peak.position),
        budget_bytes=plan.budget_bytes,
        within_budget=None
        if needed_bytes is None or plan.budget_bytes is None
        else needed_bytes <= plan.budget_bytes,
        components_s={} if seen is None else _components(plan, predicted, *seen),
        rank_peak_bytes=_by_rank(plan, dict(zip(ranks, peaks, strict=False))),
        micro_batch_size=Compared(predicted=plan.micro_batch_size, measured=micro_batch_size),
        num_micro_batches=Compared(predicted=plan.grad_accum, measured=num_micro_batches),
        unsteady=None if slowest is None else slowest.unsteady,
        plain=plan.plain,
        late_s=None if seen is None else _late_s(*seen),
    )


def _by_rank(plan: Plan, peaks: Mapping[int, PeakBreakdown | None]) -> dict[int, Compared]:
    found = {}
    for own in plan.ranks:
        peak = peaks.get(own.rank)
        found[own.rank] = Compared(
            predicted=None if own.prediction is None else own.prediction.peak_bytes,
            measured=None if peak is None else peak.allocated_bytes,
        )
    return found


def _late_s(slowest: StepTime, traffic: Communication | None) -> float | None:
    if traffic is None or traffic.late_fraction is None:
        return None
    return slowest.median_s * traffic.late_fraction


def _components(
    plan: Plan, predicted: Prediction, slowest: StepTime, traffic: Communication | None
) -> dict[str, Compared]:
    if predicted.components_s is None:
        return {}
    has_parts = bool(plan.parted_units)
    measured = measured_components(slowest, traffic, plan.recomputed_units, has_parts=has_parts)
    parts = comparable(predicted.components_s, has_parts=has_parts)
    return {
        name: Compared(predicted=parts.get(name), measured=seconds)
        for name, seconds in measured.items()
        if parts.get(name) or seconds
    }
