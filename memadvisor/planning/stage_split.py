"""Cut a chain of units into pipeline stages: Alpa's inter-operator recurrence (Zheng et al. 2022, arXiv:2201.12023).

Equation 2 there: the latency of B microbatches through stages that take t_1 ... t_k is

    T = sum_i t_i + (B - 1) max_i t_i.

Equation 3 finds the least T by trying values t_max for the maximum: F(s, u; t_max), the least sum of the first s stages over
the first u units none of which takes longer than t_max, is min over l of F(s-1, l; t_max) + t(l, u). Here a stage has one
device, so its units' own seconds sum to the same whatever the cuts; what cuts change is the sum of their messages. So T
is S(t_max) + (B - 1) t_max with S falling in t_max, and of an interval of values no more is tried where S is the same at
both ends, or where even the lower S with the smaller t_max is no better than what is known. The answer is exact
(tests/planning/test_stage_split.py holds it against all splits).

Units' seconds and bytes may be captured ones or a model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memadvisor.errors import UsageError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """One unit of a chain: seconds of one microbatch (recomputation in the backward), bytes on its device.

    `state_bytes`: of parameters, gradients and optimizer state, as they are sharded. `saved_bytes`: what autograd keeps
    of one microbatch. `message_s`: what the activation behind the unit, and its gradient on the way back, take between
    stages if the chain is cut there; the stage of this unit is taken to be busy with it.
    """

    name: str
    forward_s: float
    backward_s: float
    state_bytes: float
    saved_bytes: float
    message_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """What a stage's device has room for, and how many microbatches' activations the schedule has there at most."""

    memory_bytes: float
    num_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """`num_units` of each stage, none empty. `latency_s`: T above. `bottleneck_s`: the dearest stage's."""

    num_units: tuple[int, ...]
    latency_s: float
    bottleneck_s: float
    stage_bytes: tuple[float, ...]


def split_stages(
    units: Sequence[UnitCost], limits: Sequence[StageLimit], num_microbatches: int
) -> StageSplit | None:
    """The split into `len(limits)` stages of least latency T in which each has room; None where there is none.

    Of splits with equal T, one with the smaller bottleneck. Raises UsageError for costs or counts that cannot be.
    """
    _check(units, limits, num_microbatches)
    if len(limits) > len(units):
        return None
    chain = _Chain(units, limits)
    return chain.best(num_microbatches)


def _check(units: Sequence[UnitCost], limits: Sequence[StageLimit], num_microbatches: int) -> None:
    if not limits or num_microbatches < 1:
        raise UsageError(
            f"{num_microbatches} microbatches cannot go through {len(limits)} stages.",
            hint="both are at least 1.",
        )
    for unit in units:
        costs = (unit.forward_s, unit.backward_s, unit.message_s, unit.state_bytes, unit.saved_bytes)
        if not all(0 <= cost < float("inf") for cost in costs):
            raise UsageError(f"Unit {unit.name!r} has costs {costs}, which cannot be.")


class _Chain:
    """Seconds of every stretch of units, row `start`, column `end`; and whether stage s has room for it."""

    def __init__(self, units: Sequence[UnitCost], limits: Sequence[StageLimit]) -> None:
        count = len(units)
        self.count, self.num_stages = count, len(limits)
        self.messages = np.zeros(count + 1)
        self.messages[1:-1] = [unit.message_s for unit in units[:-1]]
        passed = np.concatenate([[0.0], np.cumsum([unit.forward_s + unit.backward_s for unit in units])])
        seconds = passed[None, :] - passed[:, None] + self.messages[None, :]
        is_stretch = np.triu(np.ones((count + 1, count + 1), dtype=bool), k=1)
        self.seconds = np.where(is_stretch, seconds, np.inf)
        states = np.concatenate([[0.0], np.cumsum([unit.state_bytes for unit in units])])
        saved = np.concatenate([[0.0], np.cumsum([unit.saved_bytes for unit in units])])
        self.held = [states + limit.num_in_flight * saved for limit in limits]
        # Differences of sums are rounded: a byte in 2**40 is none.
        self.room = [
            is_stretch & (held[None, :] - held[:, None] <= limit.memory_bytes + 1e-12 * held[-1])
            for held, limit in zip(self.held, limits, strict=True)
        ]

    def best(self, num_microbatches: int) -> StageSplit | None:
        longest = np.unique(self.seconds[np.isfinite(self.seconds)])
        if self.least_messages(float(longest[-1])) is None:
            return None
        low, high = 0, len(longest) - 1  # the smallest bottleneck that is possible
        while low < high:
            middle = (low + high) // 2
            if self.least_messages(float(longest[middle])) is None:
                low = middle + 1
            else:
                high = middle
        chosen = self._least(longest, low, num_microbatches - 1)
        found = self.least_messages(chosen)
        assert found is not None
        return self._split(found[1], num_microbatches)

    def _least(self, longest: Floats, first: int, again: int) -> float:
        """The value of t_max with the least S(t_max) + `again` t_max, of those from `first` on."""
        known = {place: self._messages_s(float(longest[place])) for place in (first, len(longest) - 1)}

        def latency(place: int) -> float:
            return known[place] + again * float(longest[place])

        best = min(known, key=lambda place: (latency(place), place))
        pending = [(first, len(longest) - 1)]
        while pending:
            low, high = pending.pop()
            reachable = known[high] + again * float(longest[min(low + 1, high)])
            if high - low < 2 or known[low] == known[high] or reachable > latency(best):
                continue
            middle = (low + high) // 2
            known[middle] = self._messages_s(float(longest[middle]))
            best = min(best, middle, key=lambda place: (latency(place), place))
            pending += [(middle, high), (low, middle)]
        return float(longest[best])

    def _messages_s(self, longest_s: float) -> float:
        found = self.least_messages(longest_s)
        assert found is not None
        return found[0]

    def least_messages(self, longest_s: float) -> tuple[float, tuple[int, ...]] | None:
        """(S less the units' own seconds, where stages end) with no stage longer than `longest_s`."""
        in_time = self.seconds <= longest_s
        reached = np.full(self.count + 1, np.inf)
        reached[0] = 0.0
        came_from: list[npt.NDArray[np.intp]] = []
        for room in self.room:
            sums = np.where(in_time & room, reached[:, None], np.inf)
            start = np.argmin(sums, axis=0)
            reached = sums[start, np.arange(self.count + 1)] + self.messages
            came_from.append(start)
        if not np.isfinite(reached[-1]):
            return None
        ends = [self.count]
        for start in reversed(came_from):
            ends.append(int(start[ends[-1]]))
        return float(reached[-1]), tuple(reversed(ends))

    def _split(self, ends: tuple[int, ...], num_microbatches: int) -> StageSplit:
        stretches = list(pairwise(ends))
        seconds = [float(self.seconds[start, end]) for start, end in stretches]
        return StageSplit(
            num_units=tuple(end - start for start, end in stretches),
            latency_s=sum(seconds) + (num_microbatches - 1) * max(seconds),
            bottleneck_s=max(seconds),
            stage_bytes=tuple(
                float(held[end] - held[start])
                for held, (start, end) in zip(self.held, stretches, strict=True)
            ),
        )
