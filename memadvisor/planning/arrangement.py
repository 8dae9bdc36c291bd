"""What each unit does and what runs ahead: the least step time whose peak stays within a budget.

Step time and peak come from the simulator alone: a unit's parameters cost nothing where the peak is
elsewhere in the step, and a collective costs nothing where compute hides it, so no sum over units
tells either. From several starts, a local search changes one unit, or many like units at once, or
(in small models) two units, for as long as the step gets faster within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from typing import Protocol

from memadvisor.cost.limit import Limit
from memadvisor.cost.step import CapturedStep
from memadvisor.plan import UnitPlan
from memadvisor.planning.outcomes import Outcome
from memadvisor.stretches import units_of_stretches

MAX_GATHER_DEPTH = 2
MAX_REDUCE_DEPTH = 2
MAX_UNITS_IN_PAIRS = 8  # units up to which two are changed at once
_MAX_GRID = 125  # class-wise arrangements tried as starts
_MAX_STARTS = 3
_SEGMENTS_PLAYED = 15_000  # what one walk of the local search may simulate, in segments

# (stage, reshard): from what communicates least to what holds least.
SHARDINGS = ((0, True), (1, True), (2, True), (3, False), (3, True))


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Everything that the search may choose: units in order of execution, and what runs ahead or behind.

    behind: how many units' reductions to shards may be under way beside compute (Plan: overlap, reduce_depth); 0: none.
    shard_ranks: how many ranks share what is sharded; None is all of them. early: units are updated in the backward; by_unit:
    one after another. stretches, secondary_ranks: see Plan; the local search here leaves them as they are, so it starts from none.
    """

    units: tuple[UnitPlan, ...]
    behind: int
    gather_depth: int
    shard_ranks: int | None = None
    early: bool = False
    stretches: tuple[tuple[str, str], ...] = ()
    secondary_ranks: int | None = None
    by_unit: bool = False

    @property
    def copied_among(self) -> int | None:
        """`secondary_ranks`, where all ranks share and some unit is gathered again for its backward."""
        gathers_again = any(unit.zero_stage == 3 and unit.reshard for unit in self.units)
        return self.secondary_ranks if gathers_again and self.shard_ranks is None else None

    @property
    def reduce_depth(self) -> int:
        """`behind`, where some unit's gradients are reduced to shards."""
        return max(1, self.behind) if any(unit.zero_stage >= 2 for unit in self.units) else 1

    @property
    def states(self) -> Hashable:
        """All that decides what the engine holds of states: the same whatever is done to activations."""
        units = ((u.zero_stage, u.reshard, u.optimizer_tier, u.parameter_tier) for u in self.units)
        return (
            tuple(units),
            self.behind,
            self.gather_depth,
            self.shard_ranks,
            self.early,
            self.secondary_ranks,
            self.by_unit,
        )

    @property
    def recomputed_units(self) -> frozenset[str]:
        """Those in stretches too."""
        names = [unit.name for unit in self.units]
        return self.recomputed.union(*units_of_stretches(self.stretches, names))

    @property
    def away(self) -> frozenset[str]:
        """Units whose activations wait on another tier."""
        return frozenset(unit.name for unit in self.units if unit.activation_tier != "device")

    @property
    def recomputed(self) -> frozenset[str]:
        """Units that are recomputed by themselves."""
        return frozenset(unit.name for unit in self.units if unit.recompute)


class Evaluate(Protocol):
    """What an arrangement gives, as far as it stays within a limit."""

    def __call__(self, arrangement: Arrangement, limit: Limit | None = None, /) -> Outcome: ...


Neighbours = Callable[["Space", Arrangement], Iterator[Arrangement]]


@dataclass(frozen=True, slots=True)
class Space:
    """What each unit may be, which units are alike, by position, and how many ranks may share what is sharded.

    behind: how many units' reductions may be under way beside compute.
    """

    options: tuple[tuple[UnitPlan, ...], ...]
    classes: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...] = tuple(range(MAX_GATHER_DEPTH + 1))
    groups: tuple[int | None, ...] = (None,)
    behind: tuple[int, ...] = tuple(range(MAX_REDUCE_DEPTH + 1))

    @property
    def size(self) -> int:
        return (
            len(self.behind)
            * len(self.depths)
            * len(self.groups)
            * math.prod(len(options) for options in self.options)
        )

    def all(self) -> Iterator[Arrangement]:
        for units, behind, depth, group in product(
            product(*self.options), self.behind, self.depths, self.groups
        ):
            yield Arrangement(units, behind, depth, group)


def space_for(step: CapturedStep, stages: Collection[int], groups: tuple[int, ...]) -> Space:
    """All that a step's units may be, in these stages and with groups of ranks that share."""
    shardings = [choice for choice in SHARDINGS if choice[0] in (stages if not step.shard_groups else (3,))]
    space = replace(space_of(step, shardings), groups=(None, *groups))
    return replace(space, behind=(int(step.device != "cpu"),)) if step.shard_groups else space


def space_of(step: CapturedStep, shardings: Sequence[tuple[int, bool]] = SHARDINGS) -> Space:
    """All that a step's units may be, of these stages."""
    options = []
    for unit in step.units:
        again = (False, True) if unit.name in step.recomputable else (False,)
        options.append(
            tuple(
                UnitPlan(name=unit.name, zero_stage=stage, recompute=recompute, reshard=reshard)
                for (stage, reshard), recompute in product(shardings, again)
            )
        )
    return Space(tuple(options), classes_of(step))


def classes_of(step: CapturedStep) -> tuple[tuple[int, ...], ...]:
    """The positions of units of one type and size, which are alike."""
    classes: dict[tuple[str, int, int], list[int]] = {}
    for position, unit in enumerate(step.units):
        classes.setdefault((unit.type_name, unit.parameter_bytes, unit.trainable_bytes), []).append(position)
    return tuple(tuple(positions) for positions in classes.values())


def choose_arrangement(
    space: Space, evaluate: Evaluate, starts: Iterable[Arrangement], budget_bytes: int, num_moves: int
) -> Arrangement:
    """The fastest arrangement found whose peak is within the budget, else the one of least peak found.

    At most `num_moves` moves are tried from a start. Where all arrangements are no more than that, all of them
    are, and the answer is exact. Else it is never slower than any of `starts` that fits, but not always the
    fastest there is: docs/planning/measured.md says how near it comes.
    """
    if space.size <= num_moves:
        return min(space.all(), key=lambda arrangement: _rank(evaluate(arrangement), budget_bytes))
    tried = list(dict.fromkeys((*starts, *_grid(space))))
    within = Limit(peak_bytes=budget_bytes)
    fitting = [start for start in tried if evaluate(start, within).peak_bytes <= budget_bytes]
    if not fitting:
        lowest = min(tried, key=lambda start: evaluate(start).peak_bytes)
        lowest = _descended(space, evaluate, lowest, budget_bytes, num_moves)
        if evaluate(lowest).peak_bytes > budget_bytes:
            return lowest
        fitting = [lowest]
    fitting.sort(key=lambda start: evaluate(start).step_time_s)
    ends = [hurried(space, evaluate, start, budget_bytes, num_moves) for start in fitting[:_MAX_STARTS]]
    best = min(ends, key=lambda end: evaluate(end).step_time_s)
    return hurried(space, evaluate, best, budget_bytes, num_moves, _with_pairs)


def hurried(
    space: Space,
    evaluate: Evaluate,
    start: Arrangement,
    budget_bytes: int,
    num_moves: int,
    neighbours: Neighbours | None = None,
) -> Arrangement:
    """Go to faster neighbours within the budget, until there is none or enough was tried; `neighbours`: by default one
    change away."""

    def is_better(found: Outcome, current: Outcome) -> bool:
        return found.peak_bytes <= budget_bytes and found.step_time_s < current.step_time_s * (1 - 1e-9)

    def limit(current: Outcome) -> Limit:
        return Limit(current.step_time_s * (1 - 1e-9), budget_bytes)

    return _walked(space, evaluate, start, is_better, limit, num_moves, neighbours or _neighbours)


def _rank(outcome: Outcome, budget_bytes: int) -> tuple[bool, float]:
    """Those within the budget by time, then the others by peak."""
    is_over = outcome.peak_bytes > budget_bytes
    return is_over, outcome.peak_bytes if is_over else outcome.step_time_s


def _grid(space: Space) -> Iterator[Arrangement]:
    """Each class of like units of one mind, with transfers ahead and behind and nothing recomputed."""
    alike = [[o for o in space.options[positions[0]] if not o.recompute] for positions in space.classes]
    if math.prod(len(options) for options in alike) > _MAX_GRID:
        return
    depth = min(1, space.depths[-1])
    for chosen in product(*alike):
        units = [options[0] for options in space.options]
        for positions, option in zip(space.classes, chosen, strict=True):
            for position in positions:
                units[position] = _as(option, units[position].name)
        yield Arrangement(tuple(units), 1 if 1 in space.behind else space.behind[-1], depth, space.groups[0])


def _descended(
    space: Space, evaluate: Evaluate, start: Arrangement, budget_bytes: int, num_moves: int
) -> Arrangement:
    """Go to neighbours of lower peak, until it is within the budget or there is none."""

    def is_better(found: Outcome, current: Outcome) -> bool:
        return found.peak_bytes < current.peak_bytes and current.peak_bytes > budget_bytes

    def limit(current: Outcome) -> Limit:
        return Limit(peak_bytes=current.peak_bytes - 1)

    return _walked(space, evaluate, start, is_better, limit, num_moves, _with_pairs)


def _walked(
    space: Space,
    evaluate: Evaluate,
    start: Arrangement,
    is_better: Callable[[Outcome, Outcome], bool],
    limit: Callable[[Outcome], Limit],
    num_moves: int,
    neighbours: Neighbours,
) -> Arrangement:
    """Take the first neighbour that is better, the boldest first, again and again. None that passes the `limit` is."""
    current, is_moving = start, True
    while is_moving and num_moves > 0:
        is_moving = False
        for neighbour in islice(neighbours(space, current), num_moves):
            num_moves -= 1
            outcome = evaluate(current)
            if is_better(evaluate(neighbour, limit(outcome)), outcome):
                current, is_moving = neighbour, True
                break
    return current


def _neighbours(space: Space, current: Arrangement) -> Iterator[Arrangement]:
    yield from (replace(current, behind=b) for b in space.behind if b != current.behind)
    yield from (replace(current, gather_depth=d) for d in space.depths if d != current.gather_depth)
    yield from (replace(current, shard_ranks=group) for group in space.groups if group != current.shard_ranks)
    for positions in space.classes:
        for option in space.options[positions[0]]:
            others = [p for p in positions if _as(option, current.units[p].name) != current.units[p]]
            size = len(others)
            while size:
                yield _changed(current, dict.fromkeys(others[-size:], option))
                if size < len(others):
                    yield _changed(current, dict.fromkeys(others[:size], option))
                size //= 2


def _with_pairs(space: Space, current: Arrangement) -> Iterator[Arrangement]:
    """Also two units changed at once, in small models: what one gives up pays for the other."""
    yield from _neighbours(space, current)
    if len(current.units) > MAX_UNITS_IN_PAIRS:
        return
    for first, second in combinations(range(len(current.units)), 2):
        for one, other in product(space.options[first], space.options[second]):
            if one != current.units[first] and other != current.units[second]:
                yield _changed(current, {first: one, second: other})


def _changed(current: Arrangement, changes: dict[int, UnitPlan]) -> Arrangement:
    units = list(current.units)
    for position, option in changes.items():
        units[position] = _as(option, units[position].name)
    return replace(current, units=tuple(units))


def _as(option: UnitPlan, name: str) -> UnitPlan:
    return option if option.name == name else replace(option, name=name)


def num_moves(step: CapturedStep) -> int:
    """What one walk of the local search may try."""
    return max(50, _SEGMENTS_PLAYED // len(step.segments))


def proper_divisors(num_ranks: int) -> tuple[int, ...]:
    """Sizes of groups of ranks that may share what is sharded, beside one rank and all of them."""
    return tuple(size for size in range(2, num_ranks) if num_ranks % size == 0)


def kinds_of(step: CapturedStep, stage: int) -> list[tuple[bool, int, int]]:
    """What units of one stage may all do: reshard, reduce so many units behind, gather so many units ahead."""
    if step.shard_groups:
        behind = int(step.device != "cpu")
        return [(True, behind, 0), (True, behind, 1), (False, behind, 1)]
    kinds = [(True, int(stage == 1), 0)]  # in stage 1 overlap costs no memory
    if stage >= 2:
        kinds.append((True, 1, 1))
    if stage == 3:
        kinds.append((False, 1, 1))
    return kinds
