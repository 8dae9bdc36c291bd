"""Which units a rank of a pipeline recomputes: the least added time whose peak stays within the budget.

Several micro-batches are under way at once, so a unit that is recomputed frees its bytes in each of them, and those of late
units count at moments that those of early units count at too. Where all choices are few, they are gone through in the order
of their added time. Else the best is taken of what the programme for one chain (recompute.py) and the mixed-integer one over
all moments of the step (operators.py) find, each simulated, and of their neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import combinations

from memadvisor.cost.simulate import simulate
from memadvisor.cost.simulation import Simulation
from memadvisor.cost.step import CapturedStep
from memadvisor.plan import Plan, UnitPlan
from memadvisor.planning.operators import Programme, Selection, to_the_byte
from memadvisor.planning.recompute import Choice, choose_recomputed, improved, smallest_peak
from memadvisor.write_schedule import write_schedule

_SEGMENTS_PLAYED = 30_000  # by all choices, if all are played
_MAX_NODES = 400
_MAX_TIGHTENINGS = 4


class StageChoice:
    """Choices of one rank, for any budget; what was simulated is remembered."""

    def __init__(self, step: CapturedStep) -> None:
        self.step = step
        self._known: dict[frozenset[str], Simulation] = {}

    def play(self, recomputed: frozenset[str]) -> Simulation:
        if recomputed not in self._known:
            plan = Plan(num_ranks=1, zero_stage=0, policy="chosen", units=self.units_of(recomputed))
            self._known[recomputed] = simulate(self.step, write_schedule(plan, self.step.units), None)
        return self._known[recomputed]

    def units_of(self, recomputed: frozenset[str]) -> tuple[UnitPlan, ...]:
        return tuple(
            UnitPlan(name=unit.name, zero_stage=0, recompute=unit.name in recomputed)
            for unit in self.step.units
        )

    @property
    def everything(self) -> frozenset[str]:
        """All units that recomputing would free bytes of."""
        return frozenset(self.step.recomputable)

    def fastest(self, budget_bytes: int) -> frozenset[str] | None:
        """None where nothing that was found fits."""
        if self.play(frozenset()).peak_bytes <= budget_bytes:
            return frozenset()
        if self._are_few:
            return next((units for units in self._all if self.play(units).peak_bytes <= budget_bytes), None)
        found = [choose_recomputed(self.step, self.play, budget_bytes), self._by_programme(budget_bytes)]
        fitting = [choice for choice in found if choice is not None]
        best = min(fitting, key=lambda choice: choice.simulation.step_time_s, default=None)
        return None if best is None else best.recomputed

    def smallest(self) -> frozenset[str]:
        """The choice of least peak that was found."""
        if self._are_few:
            return min(self._all, key=lambda units: self.play(units).peak_bytes)
        return smallest_peak(self.step, self.play).recomputed

    @property
    def _are_few(self) -> bool:
        """Whether all choices are gone through."""
        return len(self.step.segments) << len(self.step.recomputable) <= _SEGMENTS_PLAYED

    @cached_property
    def _all(self) -> list[frozenset[str]]:
        """All choices, from the least added time to the most."""
        seconds = self.step.recomputable
        every = [frozenset(units) for n in range(len(seconds) + 1) for units in combinations(seconds, n)]
        return sorted(every, key=lambda units: (sum(seconds[unit] for unit in units), sorted(units)))

    @cached_property
    def _programme(self) -> Programme:
        """Of units that keep no operators."""

        def evaluate(selection: Selection) -> Simulation:
            return self.play(frozenset(selection))

        return Programme(replace(self.step, operators={}), evaluate)

    def _by_programme(self, budget_bytes: int) -> Choice | None:
        target_bytes = to_the_byte(budget_bytes)
        for _ in range(_MAX_TIGHTENINGS):
            selection = self._programme.solve(target_bytes, 0.0, _MAX_NODES)
            if selection is None:
                return None
            choice = Choice(frozenset(selection), self.play(frozenset(selection)))
            if choice.peak_bytes <= budget_bytes:
                return improved(self.step, self.play, choice, budget_bytes)
            target_bytes = min(target_bytes, budget_bytes) - (choice.peak_bytes - budget_bytes)
        return None
