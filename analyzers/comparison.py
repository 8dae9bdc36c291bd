"""What a plan promised beside what the run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memadvisor.analyzers.communication import Communication
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.residuals import comparable, measured_components
from memadvisor.analyzers.step_time import StepTime
from memadvisor.plan import Plan, Prediction
from memadvisor.run.records import CATEGORIES, UNEXPLAINED


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
        return None not in (self.predicted, self.measured) and self.predicted != self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plan's prediction beside the largest rank's peak and the slowest rank's median step.

    `by_category_bytes` is at the peak, and has `unexplained` where either side does. `reserved_bytes`: what a CUDA
    allocator reserved; where both sides know it, the budget holds that, else the peak. `components_s`: parts of the step
    time, of the slowest rank (residuals.py); empty for plans that do not say what their prediction is made of.
    `rank_peak_bytes`: of a plan with choices by rank, each rank's peak. `micro_batch_size`: samples of one, and
    `num_micro_batches` of a step, of the plan and of the traced step, which the user sets.
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

    @property
    def other_micro_batch(self) -> str | None:
        """In words, where the step was not as the plan has it; then its figures are of another step too."""
        size, number = self.micro_batch_size, self.num_micro_batches
        words, whose = [], "Its" if size.differs else "The plan's"
        if size.differs:
            words.append(
                f"The plan is for micro-batches of {_many(size.predicted, 'sample')}, and the traced step had "
                f"{size.measured:.0f}: "
                f"set {size.predicted:.0f} in the script."
            )
        if number.differs:
            words.append(
                f"{whose} steps have {_many(number.predicted, 'micro-batch')}, and the traced one had "
                f"{_many(number.measured, 'micro-batch')}: let the script "
                f"accumulate gradients over {number.predicted:.0f}, or step times are of different steps."
            )
        return " ".join(words) or None


def _many(number: float | None, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:.0f} {what if number == 1 else plural}"


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
    slowest_s = max((time.median_s for time in times if time is not None), default=None)
    reserved_bytes = max(
        (p.reserved_bytes for p in peaks if p is not None and p.reserved_bytes is not None), default=None
    )
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
        step_time_s=Compared(predicted=predicted.step_time_s, measured=slowest_s),
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
        components_s=_components(plan, predicted, times, traffics),
        rank_peak_bytes=_by_rank(plan, dict(zip(ranks, peaks, strict=False))),
        micro_batch_size=Compared(predicted=plan.micro_batch_size, measured=micro_batch_size),
        num_micro_batches=Compared(predicted=plan.grad_accum, measured=num_micro_batches),
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


def _components(
    plan: Plan,
    predicted: Prediction,
    times: Sequence[StepTime | None],
    traffics: Sequence[Communication | None],
) -> dict[str, Compared]:
    known = [(time, traffic) for time, traffic in zip(times, traffics, strict=False) if time is not None]
    if predicted.components_s is None or not known:
        return {}
    measured = measured_components(*max(known, key=lambda pair: pair[0].median_s), plan.recomputed_units)
    parts = comparable(predicted.components_s)
    return {
        name: Compared(predicted=parts.get(name), measured=seconds)
        for name, seconds in measured.items()
        if parts.get(name) or seconds
    }
