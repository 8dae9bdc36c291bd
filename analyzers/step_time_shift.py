"""By how much two runs' step times differ, and whether that is more than the steps' own noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb

import numpy as np

CONFIDENCE = 0.95
_MOST_STRETCHES = 50  # of either run; bounds the pairs that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How much longer the steps of the second run are: the Hodges-Lehmann estimate, with its interval.

    `shift_s` is the median of all differences between a step of the second run and one of the first. `interval_s` holds
    the true shift with a probability of at least CONFIDENCE, as the Mann-Whitney test's own distribution of ranks has
    it (exact; no distribution of step times is assumed); None where the steps are too few for any: four and four are
    enough, three and three are not. Steps that follow each other are alike; runs of more than 50 steps are cut into 50
    stretches of steps in order, and the medians of these are compared. The interval is about the noise inside the two
    runs. How a script's runs differ among themselves (another neighbour, another clock rate) is not in it.
    """

    shift_s: float
    interval_s: tuple[float, float] | None
    num_before: int  # steps, or stretches of steps, that were compared
    num_after: int

    @property
    def is_significant(self) -> bool | None:
        """Whether the interval leaves 0 out; None where there is no interval."""
        if self.interval_s is None:
            return None
        return not self.interval_s[0] <= 0 <= self.interval_s[1]


def shift(before_s: Sequence[float], after_s: Sequence[float]) -> Shift | None:
    """Hodges and Lehmann (1963), "Estimates of location based on rank tests", with the interval of Hollander and Wolfe,
    "Nonparametric Statistical Methods", section 4.3. None without steps on both sides."""
    if not before_s or not after_s:
        return None
    first, second = _stretches(before_s), _stretches(after_s)
    pairs_s = np.sort(np.subtract.outer(second, first), axis=None)
    outside = _num_outside(len(first), len(second))
    interval_s = None if outside == 0 else (float(pairs_s[outside - 1]), float(pairs_s[-outside]))
    return Shift(
        shift_s=float(np.median(pairs_s)),
        interval_s=interval_s,
        num_before=len(first),
        num_after=len(second),
    )


def _stretches(durations_s: Sequence[float]) -> np.ndarray:
    if len(durations_s) <= _MOST_STRETCHES:
        return np.asarray(durations_s)
    return np.array([np.median(part) for part in np.array_split(np.asarray(durations_s), _MOST_STRETCHES)])


@cache
def _num_outside(num_first: int, num_second: int) -> int:
    """The largest k such that P(U < k) is at most half of what CONFIDENCE leaves: the interval is from the k-th smallest
    to the k-th largest of all differences. 0: there is no such k."""
    counts = _mann_whitney_counts(num_first, num_second)
    allowed = (1 - CONFIDENCE) / 2 * comb(num_first + num_second, num_first)
    below = 0
    for k, count in enumerate(counts):
        below += count
        if below > allowed:
            return k
    raise AssertionError("all probability is below half of what is left")


def _mann_whitney_counts(num_first: int, num_second: int) -> list[int]:
    """How many of the orders of so many and so many values have each U: coefficients of the Gaussian binomial, the
    product over i of (1 - q^(num_second + i)) / (1 - q^i)."""
    size = num_first * num_second + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, num_first + 1):
        for power in range(size - 1, num_second + i - 1, -1):
            counts[power] -= counts[power - num_second - i]
        for power in range(i, size):
            counts[power] += counts[power - i]
    return counts
