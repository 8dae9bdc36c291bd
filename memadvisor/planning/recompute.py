"""Which units to recompute: the least added time whose peak stays within a budget.

The dynamic programme over the chain of units (chain.py) finds a choice, and a local search ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memadvisor.cost.step import CapturedStep
from memadvisor.planning.chain import NOTHING, Chain, Taken, whole_ways
from memadvisor.planning.outcomes import Played

# Simulate with these units recomputed.
Evaluate = Callable[[frozenset[str]], Played]

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
    ways = {unit: (NOTHING, way) for unit, way in whole_ways(step).items()}
    found = Chain(step, ways, lambda taken: evaluate(_recomputed(taken))).fitting(budget_bytes)
    if found is not None:
        choice = Choice(_recomputed(found[0]), found[1])
        return improved(step, evaluate, choice, budget_bytes) if polish else choice
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


def _recomputed(taken: Taken) -> frozenset[str]:
    return frozenset(unit for unit, way in taken.items() if way.is_whole)
