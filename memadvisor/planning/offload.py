"""Which units' activations wait on another tier, which are recomputed, which both, and which stay: one choice for a
budget.

A unit that is recomputed may have what it keeps moved: its inputs, or as in Megatron-Kwai (ATC'24) these and what its
products give, so that its cheap operators alone run again.

A unit's transfers are hidden where the write fits under the next unit's forward, and the read under that unit's backward:
the windows that Megatron-Kwai (ATC'24) and POFO (NeurIPS'21) fill. The search starts from the best recomputation
without any transfer and from filled windows, and then changes units one by one and many alike at once, with
the simulator's time and peak alone (arrangement.py). Where all choices are few, all of them are played.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

from memadvisor.cost.activations import Activations
from memadvisor.cost.limit import Limit
from memadvisor.cost.moved_activations import units_away
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.stretches import Stretches
from memadvisor.cost.transfers import TransferTimes
from memadvisor.plan import Plan, UnitPlan
from memadvisor.planning.arrangement import Arrangement, Space, choose_arrangement, classes_of, hurried
from memadvisor.planning.operators import products_of
from memadvisor.planning.outcomes import Outcome, Outcomes
from memadvisor.write_schedule import write_schedule

_NEAR = 5e-3  # of a step: so near to the plain step's time the search is not gone on with


@dataclass(frozen=True)
class OffloadSearch:
    """Of one step and one way of sharding it: `plain`, in which nothing is recomputed and nothing is elsewhere."""

    step: CapturedStep
    plain: Arrangement
    tier: str
    times: TransferTimes
    play: Callable[[Arrangement, Limit | None], Outcome]
    peak_bytes: Callable[[Arrangement], int]
    may_keep: bool = True  # outputs of operators

    @cached_property
    def movable(self) -> tuple[str, ...]:
        """Units that keep anything large enough to be moved, in order of execution."""
        moving = {unit for storages in self.step.saved for unit, _ in storages.movable_by}
        return tuple(unit.name for unit in self.plain.units if unit.name in moving)

    def fastest(self, budget_bytes: int, starts: Iterable[Arrangement], num_moves: int) -> Arrangement | None:
        """The fastest found within the budget, else the one of least peak; None where nothing can be moved.

        No slower than any of `starts` that fits, but for what a search of few of many choices gives up: _NEAR of a step.
        Without moves: the best of the starts and of filled windows.
        """
        if not self.movable:
            return None
        first = [*self._windows(budget_bytes), *(start for start in starts if not start.stretches)]
        first += [self.plain, self._with(self.movable, ()), self._with(self.movable, self._taking)]
        is_exact = self._space.size <= num_moves
        limit_s = self._evaluate(self.plain).step_time_s * (1 + (1e-9 if is_exact else _NEAR))
        free = [start for start in first if self._fits(start, budget_bytes)]
        free = [start for start in free if self._evaluate(start).step_time_s <= limit_s]
        if (
            free
        ):  # none is (much) faster, as none is faster than the plain step; of these, that which moves least
            return min(free, key=lambda start: len(start.away))
        return choose_arrangement(self._space, self._evaluate, first, budget_bytes, num_moves)

    def faster(
        self, budget_bytes: int, starts: Iterable[Arrangement], limit_s: float, num_moves: int
    ) -> Arrangement | None:
        """The fastest found within the budget that takes less time than this; None where none was found."""
        if not self.movable:
            return None
        limit = Limit(limit_s, budget_bytes)
        first = [self._with(self.movable, ()), *self._windows(budget_bytes), *starts]
        first.append(self._with(self.movable, self._taking))
        fitting = [one for one in dict.fromkeys(first) if not self._evaluate(one, limit).passes(limit)]
        if not fitting:
            return None
        best = min(fitting, key=lambda one: self._evaluate(one).step_time_s)
        return hurried(self._space, self._evaluate, best, budget_bytes, num_moves)

    @cached_property
    def _taking(self) -> frozenset[str]:
        """Recomputable units whose inputs can be moved."""
        taking = {unit for storages in self.step.saved for unit, _ in storages.taken_by}
        return frozenset(taking & self.step.recomputable.keys())

    @cached_property
    def _space(self) -> Space:
        options = []
        for unit in self.plain.units:
            own = [unit]
            if unit.name in self.step.recomputable:
                own.append(replace(unit, recompute=True))
            if unit.name in self.movable:
                own.append(replace(unit, activation_tier=self.tier))
            both = replace(unit, recompute=True, activation_tier=self.tier)
            if unit.name in self._taking:
                own.append(both)
            may_keep = self.may_keep and unit.name in self.step.recomputable
            if may_keep and (kept := products_of(self.step, unit.name)):
                own.append(replace(both, kept=kept))
            options.append(tuple(own))
        return Space(
            tuple(options),
            classes_of(self.step),
            depths=(self.plain.gather_depth,),
            groups=(self.plain.shard_ranks,),
            behind=(self.plain.behind,),
        )

    @cached_property
    def _evaluate(self) -> Outcomes[Arrangement]:
        return Outcomes(self.play)

    def _with(self, away: Collection[str], again: Collection[str]) -> Arrangement:
        def changed(unit: UnitPlan) -> UnitPlan:
            unit = replace(unit, recompute=True) if unit.name in again else unit
            return replace(unit, activation_tier=self.tier) if unit.name in away else unit

        return replace(self.plain, units=tuple(changed(unit) for unit in self.plain.units))

    def _windows(self, budget_bytes: int) -> Iterator[Arrangement]:
        """All hidden transfers, as many of them from the first unit on as the budget needs, and where all of them are
        too few, as many of the other units recomputed."""
        hidden = self.hidden
        if not hidden:
            return
        yield self._with(hidden, ())
        if self._fits(self._with(hidden, ()), budget_bytes):
            fewest = self._fewest(lambda number: self._with(hidden[:number], ()), len(hidden), budget_bytes)
            yield self._with(hidden[:fewest], ())
            return
        rest = [name for name in self.step.recomputable if name not in hidden]
        fewest = self._fewest(lambda number: self._with(hidden, rest[:number]), len(rest), budget_bytes)
        yield self._with(hidden, rest[:fewest])

    def _fits(self, arrangement: Arrangement, budget_bytes: int) -> bool:
        return self.peak_bytes(arrangement) <= budget_bytes

    def _fewest(self, taken: Callable[[int], Arrangement], most: int, budget_bytes: int) -> int:
        """How many are needed to fit, if more never need more memory."""
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            if self._fits(taken(middle), budget_bytes):
                high = middle
            else:
                low = middle + 1
        return high

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """Units that can be moved as they are while others compute."""
        return hidden_transfers(self.step, self._with(self.movable, ()).units, self.times)


def hidden_transfers(
    step: CapturedStep, units: tuple[UnitPlan, ...], times: TransferTimes
) -> tuple[str, ...]:
    """Of units that keep activations elsewhere, those whose transfers take no longer than the forward, and the backward,
    of the unit behind them."""
    schedule = write_schedule(Plan(num_ranks=1, zero_stage=0, policy="chosen", units=units), step.units)
    away = units_away(schedule)
    moves = Activations(step, Stretches(schedule.stretches), schedule.kept, away).moves
    windows = {
        (segment.phase, segment.unit, segment.pass_number): segment.duration_s for segment in step.segments
    }
    slow, sending = set(), {unit for unit, _ in moves.written}
    for phase, transfers, seconds in (
        ("forward", moves.written, times.write_s),
        ("backward", moves.read, times.read_s),
    ):
        for (unit, number), sent in transfers.items():
            window_s = windows.get((phase, away[unit].gone_after, number), 0.0)
            if seconds(away[unit].lane, sent.size_bytes) > window_s:
                slow.add(unit)
    return tuple(unit.name for unit in units if unit.name in sending - slow)


def offload_choice(
    search: OffloadSearch,
    choose: Callable[[int], Arrangement | None],
    smallest: Arrangement,
    num_moves: int,
) -> Callable[[int, bool], Arrangement | None]:
    """The search's answer for any budget, roughly if so asked, from the one without transfers."""

    @cache
    def offload(target_bytes: int, is_rough: bool) -> Arrangement | None:
        start = choose(target_bytes) or smallest
        return search.fastest(target_bytes, [start], 0 if is_rough else num_moves)

    return offload
