"""Which calls of a unit that is called several times run again, where all of them would do.

The last calls go backward first: what they keep is gone before the others run again. So of each unit that a choice recomputes
as many of its last calls as the budget holds keep what they do, those of the unit that takes longest first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from memadvisor.cost.kept_calls import keepable_calls
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.outcomes import Played
from memadvisor.planning.stretches import Nested, nested_with

Play = Callable[[Nested], Played]


class SparedCalls:
    """Of one step, and one way of sharding it."""

    def __init__(self, step: CapturedStep, play: Play) -> None:
        self._step = step
        self._play = play

    @cached_property
    def _calls(self) -> dict[str, int]:
        return keepable_calls(self._step)

    def of(self, recomputed: frozenset[str], budget_bytes: int) -> Nested | None:
        """With units that a choice within the budget recomputes; None where none of their calls can be spared."""
        units = sorted(recomputed & self._calls.keys(), key=lambda unit: -self._step.recomputable[unit])
        kept: dict[str, tuple[int, ...]] = {}
        for unit in units:
            kept |= {unit: self._last_calls(recomputed, kept, unit, budget_bytes)}
        return nested_with(recomputed, (), {}, kept_calls=kept) if any(kept.values()) else None

    def _last_calls(
        self, recomputed: frozenset[str], kept: dict[str, tuple[int, ...]], unit: str, budget_bytes: int
    ) -> tuple[int, ...]:
        """As many of a unit's as fit, by halving: each that is kept adds to the peak."""
        number = self._calls[unit]
        fits, too_many = 0, number  # all of them: then the unit would not have been chosen
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            calls = {**kept, unit: tuple(range(number - middle, number))}
            peak_bytes = self._play(nested_with(recomputed, (), {}, kept_calls=calls)).peak_bytes
            fits, too_many = (middle, too_many) if peak_bytes <= budget_bytes else (fits, middle)
        return tuple(range(number - fits, number))
