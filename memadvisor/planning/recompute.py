"""Which units to recompute: the least added time whose peak stays within a budget.

Saved tensors of a chain live nested: those of early units outlast those of late ones. So the bytes that
a choice frees at a moment are those of all chosen units before it, and a dynamic programme from the
first unit to the last, over (added time, freed bytes) with dominated pairs pruned, is exact for the
level of a chain. Tensors that flow between units bend that a little; therefore every answer is
simulated, the budget inside the programme is tightened until the simulation agrees, and a local search
ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memadvisor.cost.step import CapturedStep, Inner
from memadvisor.planning.chain_states import State, undominated
from memadvisor.planning.outcomes import Played

# Simulate with these units recomputed.
Evaluate = Callable[[frozenset[str]], Played]

_MAX_TIGHTENINGS = 12
_MAX_DESCENTS = 24
_MAX_EXCHANGES = 400  # recomputed units times all units


@dataclass(frozen=True, slots=True)
class Choice:
    """Units to recompute, and the simulation of just these."""

    recomputed: frozenset[str]
    simulation: Played

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes


def choose_recomputed(
    step: CapturedStep, evaluate: Evaluate, budget_bytes: int, *, polish: bool = True
) -> Choice | None:
    """The choice of least step time within the budget; None where none was found.

    Without `polish` the local search at the end is left out.
    """
    nothing = Choice(frozenset(), evaluate(frozenset()))
    if nothing.peak_bytes <= budget_bytes or not step.recomputable:
        return nothing if nothing.peak_bytes <= budget_bytes else None
    chain = _Chain(step, evaluate)
    inner_budget_bytes = budget_bytes
    over_bytes = 0
    before: frozenset[str] | None = None
    for _ in range(_MAX_TIGHTENINGS):
        recomputed = chain.solve(inner_budget_bytes)
        if recomputed is None:
            break
        choice = Choice(recomputed, evaluate(recomputed))
        if choice.peak_bytes <= budget_bytes:
            return improved(step, evaluate, choice, budget_bytes) if polish else choice
        # The same again: what it is over by is less than a unit.
        over_bytes = 2 * over_bytes if recomputed == before else choice.peak_bytes - budget_bytes
        inner_budget_bytes -= over_bytes
        before = recomputed
    everything = Choice(frozenset(step.recomputable), evaluate(frozenset(step.recomputable)))
    if everything.peak_bytes <= budget_bytes:
        return improved(step, evaluate, everything, budget_bytes) if polish else everything
    return None


def smallest_peak(step: CapturedStep, evaluate: Evaluate) -> Choice:
    """The choice of least peak that the search can find."""
    best = min(
        (Choice(units, evaluate(units)) for units in (frozenset(), frozenset(step.recomputable))),
        key=lambda choice: choice.peak_bytes,
    )
    for _ in range(_MAX_DESCENTS):
        lower = choose_recomputed(step, evaluate, best.peak_bytes - 1, polish=False)
        if lower is None:
            break
        best = lower
    return best


def improved(step: CapturedStep, evaluate: Evaluate, choice: Choice, budget_bytes: int) -> Choice:
    """Drop one unit, or exchange one for another, as long as it stays within the budget and gets faster."""
    while True:
        better = next(
            (
                candidate
                for units in _neighbours(step, choice.recomputed)
                if (candidate := Choice(units, evaluate(units))).peak_bytes <= budget_bytes
                and candidate.simulation.step_time_s < choice.simulation.step_time_s * (1 - 1e-9)
            ),
            None,
        )
        if better is None:
            return choice
        choice = better


def _neighbours(step: CapturedStep, recomputed: frozenset[str]) -> Iterator[frozenset[str]]:
    """Choices that take less time: one unit less, slowest first, or a slower one for a faster one.

    In long chains exchanges, a square, are left to the programme; and of units that save alike, the last one alone is
    left out: what it saves is kept for the shortest time.
    """
    seconds = step.recomputable
    is_long = len(recomputed) * len(seconds) > _MAX_EXCHANGES
    candidates = _last_alike(step, recomputed) if is_long else recomputed
    for unit in sorted(candidates, key=lambda name: -seconds[name]):
        yield recomputed - {unit}
    if is_long:
        return
    for unit in recomputed:
        for other in seconds.keys() - recomputed:
            if seconds[other] < seconds[unit] * (1 - 1e-9):
                yield recomputed - {unit} | {other}


def _last_alike(step: CapturedStep, recomputed: frozenset[str]) -> list[str]:
    """Of units that save as many bytes, the last one in the forward."""
    saved: dict[str, int] = dict.fromkeys(recomputed, 0)
    born: dict[str, int] = {}
    for item in step.inner:
        if item.unit in saved:
            saved[item.unit] += item.size_bytes
            born[item.unit] = item.birth_segment
    last: dict[int, str] = {}
    for unit in sorted(born, key=lambda name: born[name]):
        last[saved[unit]] = unit
    return list(last.values())


class _Chain:
    """The levels of a step as the dynamic programme sees them.

    `needs[k]`: highest level where just the first k units' tensors are alive. `own[k]`: the same for the
    k-th unit's own forward and backward, if it is kept and if it is recomputed. All before anything is freed.
    """

    def __init__(self, step: CapturedStep, evaluate: Evaluate) -> None:
        self.seconds = step.recomputable
        first: dict[str, int] = {}
        for item in step.inner:
            # One that owns no parameters, as a tied head, is not the plan's.
            if item.unit in step.recomputable:
                first.setdefault(item.unit, item.freed_after_segment)
        self.order = sorted(first, key=lambda unit: first[unit])
        self.sizes = dict.fromkeys(self.order, 0)
        inner = _inner_of(step)
        freed = [0] * (len(step.segments) + 1)
        depth = [0] * (len(step.segments) + 1)
        for unit in self.order:
            spans: list[tuple[int, int]] = []
            for item in inner[unit]:
                freed[item.freed_after_segment + 1] += item.size_bytes
                freed[item.death_segment] -= item.size_bytes
                spans.append((item.freed_after_segment, item.death_segment))
            for birth, death in _merged(spans):
                depth[birth + 1] += 1
                depth[death] -= 1
            self.sizes[unit] = _bytes_of_first_pass(inner[unit])
        kept, all_freed = evaluate(frozenset()), evaluate(frozenset(self.order))
        self.needs = [0] * (len(self.order) + 1)
        self.own = {unit: [0, 0] for unit in self.order}
        self._fill(step, kept, all_freed, _running(freed), _running(depth))

    def _fill(
        self, step: CapturedStep, kept: Played, all_freed: Played, freed: list[int], depth: list[int]
    ) -> None:
        for position, total_bytes in kept.moments.totals():
            unit = step.segments[position].unit
            if unit in self.own:
                self.own[unit][0] = max(self.own[unit][0], total_bytes)
            else:
                place = depth[position]
                self.needs[place] = max(self.needs[place], total_bytes)
        for position, total_bytes in all_freed.moments.totals():
            unit = step.segments[position].unit
            if unit in self.own:
                self.own[unit][1] = max(self.own[unit][1], total_bytes + freed[position])

    def solve(self, budget_bytes: int) -> frozenset[str] | None:
        """Units of least added time such that each level less what is freed by then is within the budget."""
        states: list[State[str]] = [State(0.0, 0, None, None)]
        for position, unit in enumerate(self.order):
            states = [s for s in states if self.needs[position] - s.freed_bytes <= budget_bytes]
            kept_level, recomputed_level = self.own[unit]
            following = [
                State(s.added_s, s.freed_bytes, s, None)
                for s in states
                if kept_level - s.freed_bytes <= budget_bytes
            ]
            following += [
                State(s.added_s + self.seconds[unit], s.freed_bytes + self.sizes[unit], s, unit)
                for s in states
                if recomputed_level - s.freed_bytes <= budget_bytes
            ]
            states = undominated(following)
        last = [s for s in states if self.needs[-1] - s.freed_bytes <= budget_bytes]
        return _units_of(min(last, key=lambda s: s.added_s)) if last else None


def _inner_of(step: CapturedStep) -> dict[str, list[Inner]]:
    """What each unit alone keeps, of all micro-batches."""
    found: dict[str, list[Inner]] = {}
    for item in step.inner:
        found.setdefault(item.unit, []).append(item)
    return found


def _bytes_of_first_pass(own: Sequence[Inner]) -> int:
    """What one micro-batch saves for a unit: all that comes back in the same backward."""
    first = min(own, key=lambda item: item.freed_after_segment).death_segment
    return sum(item.size_bytes for item in own if item.death_segment == first)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping spans of one unit as one: under autocast its cast weights are freed later than the rest."""
    merged: list[tuple[int, int]] = []
    for birth, death in sorted(spans):
        if merged and birth < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], death))
        else:
            merged.append((birth, death))
    return merged


def _running(steps: list[int]) -> list[int]:
    total, sums = 0, []
    for change in steps:
        total += change
        sums.append(total)
    return sums


def _units_of(state: State[str]) -> frozenset[str]:
    return frozenset(unit for unit in state.ways() if unit is not None)
