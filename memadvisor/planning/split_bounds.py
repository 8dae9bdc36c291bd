"""Ways of sharding a split micro-batch that need not be searched, because what is known already beats them.

A split takes no less time than fewer micro-batches with nothing recomputed: it computes as much, communicates at least
as much, and has a shorter last backward, and a shorter first forward, to hide that under. So where a plan of fewer
micro-batches fits and is as fast as a way with nothing recomputed, no split of that way is shown (advise.py); nor where a
plan of as many micro-batches fits and is faster. Of such a way's peaks the smallest is all that anybody asks for: that with
everything recomputed, unless it is the least of all. Storages only shrink with the micro-batch, so the last split has it.
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
    """What a search has seen of the steps before the one that it is at, which has more micro-batches, and of that one."""

    def __init__(self, times: CollectiveTimes | None) -> None:
        slowdown = None if times is None else times.slowdown
        # Else less overlap is faster, and a split has less of it.
        self._holds = slowdown is None or 1 / slowdown.compute + 1 / slowdown.collective >= 1
        self._least_s: dict[Way, float] = {}
        self._fitting_s = math.inf  # of the steps before
        self._fitting_here_s = math.inf
        self._brief: tuple[CapturedStep, CapturedStep] | None = None

    def brief(self, step: CapturedStep) -> CapturedStep:
        """As high as a step, in less time: of its micro-batches the first, the last, and one between, which are alike."""
        if step.repeats <= _ALL_KINDS:
            return step
        if self._brief is None or self._brief[0] is not step:
            self._brief = step, replace(step, repeats=_ALL_KINDS)
        return self._brief[1]

    def saw(self, way: Way, plain_s: float) -> None:
        """A way with nothing recomputed takes so long; steps come by the number of their micro-batches."""
        self._least_s[way] = max(plain_s, self._least_s.get(way, 0.0))

    def fit(self, plans: Iterable[RankedPlan]) -> None:
        """Of the step that the search is at: each of these, or one that is no slower, will be among those found for it."""
        fitting = (ranked.prediction.step_time_s for ranked in plans if ranked.fits)
        self._fitting_here_s = min(self._fitting_here_s, *fitting, math.inf)

    def found(self, plans: Iterable[RankedPlan]) -> None:
        """All plans of a step."""
        fitting = (ranked.prediction.step_time_s for ranked in plans if ranked.fits)
        self._fitting_s = min(self._fitting_s, *fitting, math.inf)
        self._fitting_here_s = math.inf

    def beat(self, step: CapturedStep, way: Way) -> bool:
        """Whether a plan fits that is known, and no plan of this way is shown beside it."""
        if not self._holds or step.repeats == 1 or way not in self._least_s:
            return False
        # Whether one that updates in the backward is worth it is judged beside the usual one.
        least_s = min(self._least_s[way], self._least_s.get(replace(way, early=True), math.inf))
        return self._fitting_s <= least_s * (1 + 1e-9) or self._fitting_here_s * (1 + 1e-9) < least_s

    def beat_all(self) -> bool:
        """Whether no way of a split that comes now would be shown."""
        return self._holds and self._fitting_s <= min(self._least_s.values(), default=0.0) * (1 + 1e-9)
