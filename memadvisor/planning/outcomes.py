"""What arrangements give: memory told from one that is like it, and time played no further than it takes to see that it is
of no use.

What the engine holds of states depends on how units are shared, and not on what runs again or waits elsewhere. So one play
of a way of sharding tells the memory of all such choices (cost/moments.py); their times need a play each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from memadvisor.cost.limit import Limit
from memadvisor.cost.moments import Moment, Moments
from memadvisor.cost.simulation import Simulation
from memadvisor.plan import Prediction

Arranged = TypeVar("Arranged", bound=Hashable)


class Played(Protocol):
    """A simulation, or what stands for one."""

    @property
    def moments(self) -> Moments: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def peak(self) -> Moment: ...
    @property
    def step_time_s(self) -> float: ...
    def prediction(self) -> Prediction: ...


class MemoryFirst:
    """Its memory is known; it is played once somebody asks for its time."""

    def __init__(self, moments: Moments, play: Callable[[], Simulation]) -> None:
        self.moments = moments
        self._play = play

    @cached_property
    def peak_bytes(self) -> int:
        return self.moments.peak_bytes

    @property
    def peak(self) -> Moment:
        return self.moments.peak

    @cached_property
    def _simulation(self) -> Simulation:
        return self._play()

    @property
    def step_time_s(self) -> float:
        return self._simulation.step_time_s

    def prediction(self) -> Prediction:
        return self._simulation.prediction()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search needs to know of a simulation. One that is not whole has passed its limit; time and peak are the
    least that they can be then."""

    step_time_s: float
    peak_bytes: int
    is_whole: bool = True

    def passes(self, limit: Limit | None) -> bool:
        return limit is not None and limit.is_passed_by(self.step_time_s, self.peak_bytes)


def outcome_of(played: Played) -> Outcome:
    """Of one that was played to its end."""
    return Outcome(played.step_time_s, played.peak_bytes)


class Outcomes(Generic[Arranged]):
    """Remembered by arrangement. One that was not played to its end is played again where a limit asks for more."""

    def __init__(self, play: Callable[[Arranged, Limit | None], Outcome]) -> None:
        self._play = play
        self._known: dict[Arranged, Outcome] = {}

    def __call__(self, arrangement: Arranged, limit: Limit | None = None, /) -> Outcome:
        found = self._known.get(arrangement)
        if found is None or not (found.is_whole or found.passes(limit)):
            found = self._play(arrangement, limit)
            self._known[arrangement] = found
        return found
