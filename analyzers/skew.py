"""How unlike the ranks are, and who holds the others up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank beside the others.

    `caused_waiting_s` sums, over the traced step's collectives that this rank was the last to start, the
    time that each other rank had been waiting for it.
    """

    rank: int
    step_time_s: float | None  # median steady step
    compute_s: float | None  # in operators of the traced step
    waiting_s: float | None
    caused_waiting_s: float | None
    peak_allocated_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """Differences between ranks. A spread is (max - min) / median, as a fraction of 1.

    `straggler` is the rank that caused the others to wait most; None where nobody waited or it cannot be told.
    """

    ranks: tuple[RankTimes, ...]
    straggler: int | None
    step_time_spread: float | None
    compute_spread: float | None
    peak_spread: float | None


def skew(ranks: Sequence[RankRun]) -> Skew | None:
    """Compare the ranks. None for a single one."""
    raise NotImplementedError
