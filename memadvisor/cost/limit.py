"""When a step need not be played to its end: it is over what it may take by then, whatever follows.

Memory only has to be over its limit once. Of time, what compute has still to do alone is known from the start: segments and
second forwards. What collectives add to it is not, so this is the least that the whole step can take.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from memadvisor.cost.activations import Activations
from memadvisor.cost.lanes import Lanes
from memadvisor.cost.moments import Moments
from memadvisor.cost.step import CapturedStep
from memadvisor.plan import UnitPlan


@dataclass(frozen=True, slots=True)
class Limit:
    """A step is of use that takes less time than this, and no more bytes."""

    step_time_s: float = math.inf
    peak_bytes: float = math.inf

    def is_passed_by(self, step_time_s: float, peak_bytes: float) -> bool:
        return step_time_s >= self.step_time_s or peak_bytes > self.peak_bytes


class LeastTime:
    """What a step takes at the least: all that computes, with this rank's share of updates, and units that run again by
    themselves and keep nothing."""

    def __init__(self, step: CapturedStep) -> None:
        self._knows_times = not step.time_factors
        times = Counter(position for position, _, _ in step.order)
        durations = ((step.segments[position], count) for position, count in times.items())
        self._plain_s = sum(s.duration_s * count for s, count in durations if s.phase != "optimizer")
        self._optimizer_s = sum(step.segments[position].duration_s for position in step.optimizer_at)
        # By unit; of what ranks own as wholes the one that is played may have next to nothing.
        self._updated_bytes = {
            name: states.trainable_bytes - sum(update.parameter.size_bytes for update in states.whole_updates)
            for name, states in step.states.items()
        }
        self._trainable_bytes = sum(states.trainable_bytes for states in step.states.values())
        self._again_s: defaultdict[str, float] = defaultdict(float)  # by unit
        for position in step.first_backwards:
            segment = step.segments[position]
            run = step.second_runs.get((segment.unit or "", segment.pass_number))
            if run is not None:
                self._again_s[segment.unit or ""] += times[position] * run.seconds(step.second_run_cost)

    def seconds(self, units: Iterable[UnitPlan], num_ranks: int) -> float:
        """0 where nothing is known of it. `num_ranks`: that share what is sharded."""
        if not self._knows_times:
            return 0.0
        again_s = updated_bytes = 0.0
        for unit in units:
            own_bytes = self._updated_bytes.get(unit.name, 0)
            updated_bytes += own_bytes / num_ranks if unit.stage_on(num_ranks) else own_bytes
            if unit.recompute and not unit.kept and not unit.kept_calls:
                again_s += self._again_s[unit.name]
        share = updated_bytes / self._trainable_bytes if self._trainable_bytes else 0.0
        return self._plain_s + again_s + self._optimizer_s * share


class Remaining:
    """Of one simulation: what it takes at the least, seen from each segment in the order of play."""

    def __init__(
        self, step: CapturedStep, limit: Limit, activations: Activations, update_share: float
    ) -> None:
        self._limit = limit
        # Factors that were learnt scale parts of the time when the step is over (components.py).
        self._knows_times = not step.time_factors
        seconds_of = [
            segment.duration_s * (update_share if segment.phase == "optimizer" else 1.0)
            for segment in step.segments
        ]
        for position in step.first_backwards:
            segment = step.segments[position]
            again = activations.stretches.ending(segment.unit or "")
            for stretch in again if activations.runs_again(position) else ():
                seconds_of[position] += activations.again_s(stretch, segment.pass_number)
        played = [seconds_of[position] for position, _, _ in reversed(step.order)]
        self._after_s = list(accumulate(played, initial=0.0))
        self._num_checked = 0

    def is_hopeless(self, num_played: int, lanes: Lanes, moments: Moments) -> bool:
        """Whether the step passes its limit, when so many segments are over."""
        new_bytes = moments.totals_bytes[self._num_checked :]
        self._num_checked = len(moments)
        return self._limit.is_passed_by(self.step_time_s(num_played, lanes), max(new_bytes, default=0))

    def step_time_s(self, num_played: int, lanes: Lanes) -> float:
        """The least that it can be; 0 where nothing is known of it."""
        return lanes.compute_s + self._after_s[-1 - num_played] if self._knows_times else 0.0
