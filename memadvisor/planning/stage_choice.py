"""Which units a rank of a pipeline recomputes, and whose activations wait on another tier: the least added time whose peak
stays within the budget.

Several micro-batches are under way at once, so a unit that is recomputed frees its bytes in each of them, and those of late
units count at moments that those of early units count at too. Where all choices are few, they are gone through in the order
of their added time. Else the best is taken of what the programme for one chain (recompute.py) and the mixed-integer one over
all moments of the step (operators.py) find, each simulated, and of their neighbours. Where transfers are known, the search over
units that wait elsewhere, are recomputed, or both (offload.py) starts from that, and its answer is taken where it is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from memadvisor.cost.simulate import simulate
from memadvisor.cost.simulation import Simulation
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.plan import Plan, UnitPlan
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.offload import OffloadSearch
from memadvisor.planning.operators import Programme, Selection, to_the_byte
from memadvisor.planning.outcomes import outcome_of
from memadvisor.planning.paging import nearest_tier
from memadvisor.planning.recompute import Choice, choose_recomputed, improved, smallest_peak
from memadvisor.write_schedule import write_schedule

_SEGMENTS_PLAYED = 30_000  # by all choices, if all are played
_MAX_NODES = 400
_MAX_TIGHTENINGS = 4


_MIN_MOVES = 50


@dataclass(frozen=True, slots=True)
class Chosen:
    """Units that are recomputed, and those whose activations wait on another tier; one may be both."""

    recomputed: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()


class StageChoice:
    """Choices of one rank, for any budget; what was simulated is remembered. `times`: of other tiers, where known."""

    def __init__(self, step: CapturedStep, times: TransferTimes | None = None) -> None:
        self.step = step
        self.tier = nearest_tier(step, times)
        self._times = times
        self._known: dict[Chosen, Simulation] = {}

    def play(self, chosen: Chosen) -> Simulation:
        if chosen not in self._known:
            plan = Plan(num_ranks=1, zero_stage=0, policy="chosen", units=self.units_of(chosen))
            schedule = write_schedule(plan, self.step.units)
            self._known[chosen] = simulate(self.step, schedule, None, transfers=self._times)
        return self._known[chosen]

    def units_of(self, chosen: Chosen) -> tuple[UnitPlan, ...]:
        return tuple(
            UnitPlan(
                name=unit.name,
                zero_stage=0,
                recompute=unit.name in chosen.recomputed,
                activation_tier=self.tier or "device" if unit.name in chosen.moved else "device",
            )
            for unit in self.step.units
        )

    def added_s(self, chosen: Chosen) -> float:
        """What the rank's step gets longer by, if it waits for other ranks no longer."""
        return self.play(chosen).step_time_s - self.play(Chosen()).step_time_s

    @property
    def everything(self) -> Chosen:
        """All units that recomputing would free bytes of, recomputed."""
        return Chosen(frozenset(self.step.recomputable))

    def fastest(self, budget_bytes: int) -> Chosen | None:
        """None where nothing that was found fits."""
        if self.play(Chosen()).peak_bytes <= budget_bytes:
            return Chosen()
        found = [self._fastest_recomputed(budget_bytes)]
        found.append(self._moving(budget_bytes, found[0] or self._least_recomputed()))
        fitting = [c for c in found if c is not None and self.play(c).peak_bytes <= budget_bytes]
        return min(fitting, key=lambda chosen: self.play(chosen).step_time_s, default=None)

    def smallest(self) -> Chosen:
        """The choice of least peak that was found."""
        least = self._least_recomputed()
        found = [least, self._moving(0, least) or least]
        return min(found, key=lambda chosen: self.play(chosen).peak_bytes)

    def _fastest_recomputed(self, budget_bytes: int) -> Chosen | None:
        if self._are_few:
            return next((own for own in self._all if self.play(own).peak_bytes <= budget_bytes), None)
        found = [
            choose_recomputed(self.step, self._recomputing, budget_bytes),
            self._by_programme(budget_bytes),
        ]
        fitting = [choice for choice in found if choice is not None]
        best = min(fitting, key=lambda choice: choice.simulation.step_time_s, default=None)
        return None if best is None else Chosen(best.recomputed)

    def _least_recomputed(self) -> Chosen:
        if self._are_few:
            return min(self._all, key=lambda chosen: self.play(chosen).peak_bytes)
        return Chosen(smallest_peak(self.step, self._recomputing).recomputed)

    def _recomputing(self, units: frozenset[str]) -> Simulation:
        return self.play(Chosen(units))

    def _moving(self, budget_bytes: int, start: Chosen) -> Chosen | None:
        """None where no tier's transfers are known, or nothing can be moved."""
        if self.tier is None or self._times is None:
            return None
        search = OffloadSearch(
            self.step,
            self._arranged(Chosen()),
            self.tier,
            self._times,
            lambda arrangement, _: outcome_of(self.play(_chosen(arrangement))),
            lambda arrangement: self.play(_chosen(arrangement)).peak_bytes,
            may_keep=False,
        )
        num_moves = max(_MIN_MOVES, _SEGMENTS_PLAYED // len(self.step.segments))
        found = search.fastest(budget_bytes, [self._arranged(start)], num_moves)
        return None if found is None else _chosen(found)

    def _arranged(self, chosen: Chosen) -> Arrangement:
        return Arrangement(units=self.units_of(chosen), behind=0, gather_depth=0)

    @property
    def _are_few(self) -> bool:
        """Whether all choices are gone through."""
        return len(self.step.segments) << len(self.step.recomputable) <= _SEGMENTS_PLAYED

    @cached_property
    def _all(self) -> list[Chosen]:
        """All choices of recomputed units, from the least added time to the most."""
        seconds = self.step.recomputable
        every = [frozenset(units) for n in range(len(seconds) + 1) for units in combinations(seconds, n)]
        in_order = sorted(every, key=lambda units: (sum(seconds[unit] for unit in units), sorted(units)))
        return [Chosen(units) for units in in_order]

    @cached_property
    def _programme(self) -> Programme:
        """Of units that keep no operators."""

        def evaluate(selection: Selection) -> Simulation:
            return self._recomputing(frozenset(selection))

        return Programme(replace(self.step, operators={}), evaluate)

    def _by_programme(self, budget_bytes: int) -> Choice | None:
        target_bytes = to_the_byte(budget_bytes)
        for _ in range(_MAX_TIGHTENINGS):
            selection = self._programme.solve(target_bytes, 0.0, _MAX_NODES)
            if selection is None:
                return None
            choice = Choice(frozenset(selection), self._recomputing(frozenset(selection)))
            if choice.peak_bytes <= budget_bytes:
                return improved(self.step, self._recomputing, choice, budget_bytes)
            target_bytes = min(target_bytes, budget_bytes) - (choice.peak_bytes - budget_bytes)
        return None


def _chosen(arrangement: Arrangement) -> Chosen:
    return Chosen(arrangement.recomputed, arrangement.away)
