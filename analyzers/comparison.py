"""What a plan promised beside what the run measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.step_time import StepTime

from memadvisor.plan import Plan


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plan's prediction beside the largest rank's peak and the slowest rank's median step.

    `by_category_bytes` is at the peak, and has `unexplained` where either side does.
    """

    peak_bytes: Compared
    step_time_s: Compared
    by_category_bytes: dict[str, Compared]
    peak_position: tuple[str, str | None]  # predicted, measured
    budget_bytes: int | None
    within_budget: bool | None


def comparison(
    plan: Plan | None, peaks: Sequence[PeakBreakdown | None], times: Sequence[StepTime | None]
) -> Comparison | None:
    """Put prediction beside measurement. None without a plan that predicts."""
    raise NotImplementedError
