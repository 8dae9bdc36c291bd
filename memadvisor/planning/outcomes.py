"""What arrangements give, each played once, and no further than it takes to see that it is of no use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from memadvisor.cost.limit import Limit
from memadvisor.cost.simulation import Simulation

Arranged = TypeVar("Arranged", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search needs to know of a simulation. One that is not whole has passed its limit; time and peak are the
    least that they can be then."""

    step_time_s: float
    peak_bytes: int
    is_whole: bool = True

    def passes(self, limit: Limit | None) -> bool:
        return limit is not None and limit.is_passed_by(self.step_time_s, self.peak_bytes)


class Outcomes(Generic[Arranged]):
    """Remembered by arrangement. One that was not played to its end is played again where a limit asks for more.

    `least_s`: what an arrangement takes at the least, in less time than playing it takes.
    """

    def __init__(
        self,
        play: Callable[[Arranged, Limit | None], Simulation],
        least_s: Callable[[Arranged], float] = lambda _: 0.0,
    ) -> None:
        self._play = play
        self._least_s = least_s
        self._known: dict[Arranged, Outcome] = {}

    def __call__(self, arrangement: Arranged, limit: Limit | None = None, /) -> Outcome:
        found = self._known.get(arrangement)
        if found is None and limit is not None:
            found = Outcome(self._least_s(arrangement), peak_bytes=0, is_whole=False)
        if found is None or not (found.is_whole or found.passes(limit)):
            played = self._play(arrangement, limit)
            found = Outcome(played.step_time_s, played.peak_bytes, played.is_whole)
            self._known[arrangement] = found
        return found
