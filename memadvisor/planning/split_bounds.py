"""Ways of sharding a split micro-batch that need not be searched, because what is known already beats them.

A split takes no less time than the whole micro-batch with nothing recomputed: it computes as much, communicates at least
as much, and has a shorter last backward, and a shorter first forward, to hide that under. So where a plan of fewer
micro-batches fits and is as fast as a way with the whole micro-batch, no split of that way is shown
(advise.py), and of its peaks the smallest is all that anybody asks for: that with everything recomputed, unless it is
the least of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.ranked import RankedPlan
from memadvisor.planning.way import Way

_ALL_KINDS = 3  # of micro-batches that are played again: the first, those between, the last


class SplitBounds:
    """What a search has seen of the steps before the one that it is at, which has more micro-batches."""

    def __init__(self, times: CollectiveTimes | None) -> None:
        slowdown = None if times is None else times.slowdown
        # Else less overlap is faster, and a split has less of it.
        self._holds = slowdown is None or 1 / slowdown.compute + 1 / slowdown.collective >= 1
        self._least_s: dict[Way, float] = {}
        self._fitting_s = math.inf
        self._brief: tuple[CapturedStep, CapturedStep] | None = None

    def brief(self, step: CapturedStep) -> CapturedStep:
        """As high as a step, in less time: of its micro-batches the first, the last, and one between, which are alike."""
        if step.repeats <= _ALL_KINDS:
            return step
        if self._brief is None or self._brief[0] is not step:
            self._brief = step, replace(step, repeats=_ALL_KINDS)
        return self._brief[1]

    def saw(self, step: CapturedStep, way: Way, plain_s: float) -> None:
        """A way with nothing recomputed takes so long."""
        if step.repeats == 1:
            self._least_s[way] = plain_s

    def found(self, plans: Iterable[RankedPlan]) -> None:
        """The plans of a step."""
        fitting = (ranked.prediction.step_time_s for ranked in plans if ranked.fits)
        self._fitting_s = min(self._fitting_s, *fitting, math.inf)

    def beat(self, step: CapturedStep, way: Way) -> bool:
        """Whether a plan of fewer micro-batches fits and is as fast as any of this way can be."""
        is_bounded = self._holds and step.repeats > 1 and way in self._least_s
        return is_bounded and self._fitting_s <= self._least_s[way] * (1 + 1e-9)
