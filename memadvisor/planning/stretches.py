"""Which units of a step's chain to run again together, and within that again: Rotor on the captured step.

The chain is the longest run of units each of which takes what the one before it returns. Its bytes come from the
capture, and from one simulation with every unit of it recomputed by itself. The programme (rotor.py) knows the
chain alone, so what it finds is simulated, and the fastest that the simulation finds within the budget is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from memadvisor.cost.parts import Modules
from memadvisor.cost.step import Bytes, CapturedStep
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.outcomes import Played
from memadvisor.planning.rotor import Chain, ChainUnit, Stretch, above_floor

_MIN_UNITS = 3  # of a chain, for stretches to be worth it
_NEIGHBOURS = 4  # schedules tried beyond the first one that fits


@dataclass(frozen=True, slots=True)
class Nested:
    """Units recomputed by themselves, the first and last units of stretches of two and more, by unit recomputed by
    itself the operators whose outputs it keeps, units whose activations wait on another tier, by unit its parts that
    run again by themselves, and by unit that is called several times the calls that do not run again."""

    alone: frozenset[str]
    stretches: tuple[tuple[str, str], ...]
    kept: tuple[tuple[str, tuple[str, ...]], ...] = ()
    away: frozenset[str] = frozenset()
    parts: tuple[tuple[str, tuple[Modules, ...]], ...] = ()
    kept_calls: tuple[tuple[str, tuple[int, ...]], ...] = ()


def nested_with(
    alone: frozenset[str],
    stretches: tuple[tuple[str, str], ...],
    kept: Mapping[str, tuple[str, ...]],
    away: frozenset[str] = frozenset(),
    parts: Mapping[str, tuple[Modules, ...]] | None = None,
    kept_calls: Mapping[str, tuple[int, ...]] | None = None,
) -> Nested:
    operators = tuple(sorted((unit, names) for unit, names in kept.items() if names))
    inside = tuple(sorted((unit, modules) for unit, modules in (parts or {}).items() if modules))
    calls = tuple(sorted((unit, numbers) for unit, numbers in (kept_calls or {}).items() if numbers))
    return Nested(alone, stretches, operators, away, inside, calls)


def nested_of(arrangement: Arrangement) -> Nested:
    """What an arrangement does to activations."""
    kept = {unit.name: unit.kept for unit in arrangement.units}
    parts = {unit.name: unit.parts for unit in arrangement.units}
    calls = {unit.name: unit.kept_calls for unit in arrangement.units}
    return nested_with(arrangement.recomputed, arrangement.stretches, kept, arrangement.away, parts, calls)


Evaluate = Callable[[Nested], Played]
Tables = dict[tuple[tuple[ChainUnit, ...], int], Chain]  # by what each was filled for


def chain_of(step: CapturedStep) -> tuple[str, ...]:
    """The longest run of recomputable units that follow each other, each taking what the one before it makes.

    A plan names a stretch by its first and last unit in the order of their first execution. A script that leaves blocks out at
    random may have begun with them in another order than that of the captured step.
    """
    best: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    ran = {unit for unit, _ in step.forwards}
    place = {unit.name: number for number, unit in enumerate(step.units)}
    for unit in _called_once(step):
        is_of_model = bool(current) and step.models.get(current[-1]) == step.models.get(unit)
        between = step.units[place[current[-1]] + 1 : place[unit]] if is_of_model else ()
        follows = (
            is_of_model and place[current[-1]] < place[unit] and all(each.name in ran for each in between)
        )
        current = (*current, unit) if follows and _is_fed(step, current[-1], unit) else (unit,)
        best = max(best, current, key=len)
    return best


def _called_once(step: CapturedStep) -> Iterator[str]:
    """Recomputable blocks that run once, in one piece, in each micro-batch, in order, and have their backward there.

    Between single layers stands code of the script as a rule, an activation function say, that may work in place.
    """
    blocks = {unit.name for unit in step.units if unit.is_block}
    for unit in dict.fromkeys(s.unit for s in step.segments if s.phase == "forward"):
        passes = {key: found for key, found in step.forwards.items() if key[0] == unit}
        if (
            unit is not None
            and unit in blocks & step.recomputable.keys()
            and all(len(pieces) == 1 for pieces in passes.values())
            and passes.keys() <= step.backwards.keys()
            and unit not in step.called_again
        ):
            yield unit


def _is_fed(step: CapturedStep, before: str, unit: str) -> bool:
    """Whether all that a unit takes and that is made after the unit before it began is what that one makes."""
    begins = min(position for (name, _), position in step.forward_at.items() if name == before)
    taken = [tensor for tensor in step.boundaries if unit in tensor.input_of]
    late = [tensor for tensor in taken if tensor.birth_segment >= begins]
    micro_batch = step.segments[begins].micro_batch
    first_pass = [t for t in late if step.segments[t.birth_segment].micro_batch == micro_batch]
    return bool(first_pass) and all(step.maker_of(tensor) == before for tensor in first_pass)


class NestedSearch:
    """Nested recomputation of one step's chain under one way of sharding it.

    `outside`: units that the chain does not hold and that are recomputed besides. `tables`: of other ways of sharding the
    same step, whose chain may need the same beside what is there all the time; and where those made here go.
    """

    def __init__(
        self,
        step: CapturedStep,
        evaluate: Evaluate,
        outside: frozenset[str] = frozenset(),
        tables: Tables | None = None,
    ) -> None:
        self._step = step
        self._evaluate = evaluate
        self._tables = {} if tables is None else tables
        self._outside = outside
        self._schedules: dict[int, Nested] = {}  # by place in `_budgets`

    @cached_property
    def chain(self) -> tuple[str, ...]:
        return chain_of(self._step)

    def units_of(self, pair: tuple[str, str]) -> tuple[str, ...]:
        """All units of a stretch of the chain, by its first and last."""
        first, last = map(self.chain.index, pair)
        return self.chain[first : last + 1]

    @cached_property
    def _table(self) -> Chain:
        """Up to the memory that the chain takes when nothing of it is recomputed."""
        plain = self._evaluate(Nested(self._outside, ()))
        freed = self._evaluate(Nested(self._outside | set(self.chain), ()))
        units, floor_bytes = above_floor(chain_units(self._step, self.chain, freed))
        asked = units, plain.peak_bytes - floor_bytes
        if asked not in self._tables:
            self._tables[asked] = Chain(*asked)
        return self._tables[asked]

    @cached_property
    def _budgets(self) -> list[int]:
        """Those of the programme; each takes less memory and more time than the one before it."""
        return self._table.budgets() if len(self.chain) >= _MIN_UNITS else []

    def _at(self, place: int) -> Nested:
        """The programme's schedule of one of its budgets."""
        if place not in self._schedules:
            self._schedules[place] = self._schedule(place)
        return self._schedules[place]

    def _schedule(self, place: int) -> Nested:
        body = self._table.body(self._budgets[place])
        if body is None:
            raise AssertionError("a budget of the table has a schedule")
        stretches = list(_all_stretches(body))
        alone = {self.chain[s.first] for s in stretches if s.first == s.last}
        pairs = tuple((self.chain[s.first], self.chain[s.last]) for s in stretches if s.first < s.last)
        return Nested(self._outside | alone, pairs)

    def fastest(self, budget_bytes: int) -> Nested | None:
        """The fastest found whose simulated peak is within the budget; None where none is."""
        # Peaks fall along the list, but for what the programme does not know.
        low, high = 0, len(self._budgets)
        while low < high:
            middle = (low + high) // 2
            if self._peak_bytes(self._at(middle)) <= budget_bytes:
                high = middle
            else:
                low = middle + 1
        near = range(max(0, high - _NEIGHBOURS), min(len(self._budgets), high + _NEIGHBOURS))
        fitting = [nested for place in near if self._peak_bytes(nested := self._at(place)) <= budget_bytes]
        return min(fitting, key=lambda nested: self._evaluate(nested).step_time_s, default=None)

    def smallest(self) -> Nested | None:
        """That of least simulated peak, of those that take longest."""
        last = range(max(0, len(self._budgets) - 2 * _NEIGHBOURS), len(self._budgets))
        return min((self._at(place) for place in last), key=self._peak_bytes, default=None)

    def _peak_bytes(self, nested: Nested) -> int:
        return self._evaluate(nested).peak_bytes


def _all_stretches(body: Iterable[int | Stretch]) -> Iterator[Stretch]:
    for item in body:
        if isinstance(item, Stretch):
            yield item
            yield from _all_stretches(item.body)


def chain_units(step: CapturedStep, chain: tuple[str, ...], freed: Played) -> list[ChainUnit]:
    """The chain in its last micro-batch as the programme needs it, and behind it all that runs before its backward.

    `freed`: the simulation with every unit of the chain recomputed by itself, so that each keeps its input alone.
    """
    micro_batch = max((mb for unit, mb in step.forwards if unit == chain[0]), key=lambda mb: mb or 0)
    levels, again = _levels(freed)
    forward_at = [_position(step, "forward", unit, micro_batch) for unit in chain]
    backward_at = [step.backwards[unit, micro_batch] for unit in chain]
    inputs = [0, *(_made_bytes(step, unit, micro_batch) for unit in chain)]
    units = []
    kept_bytes = 0
    for place, unit in enumerate(chain):
        kept_bytes += inputs[place]
        segment = step.segments[forward_at[place]]
        start = _total(segment.captured.start)
        plain = max(0, _total(segment.captured.peak_unsaved) - start)
        inner = sum(item.size_bytes for item in step.inner_of.get((unit, micro_batch), ()))
        saved = inner + inputs[place + 1]
        before_backward = again[backward_at[place]] - _total(segment.growth) - kept_bytes
        units.append(
            ChainUnit(
                forward_s=segment.duration_s,
                input_bytes=inputs[place],
                saved_bytes=saved,
                plain_bytes=plain,
                saving_bytes=max(0, _total(segment.captured.peak) - start),
                backward_bytes=levels[backward_at[place]] - before_backward - kept_bytes - saved,
                forward_level_bytes=levels[forward_at[place]] - plain - kept_bytes,
                backward_level_bytes=before_backward,
            )
        )
    between = [
        levels[position] for position in range(forward_at[-1] + 1, backward_at[-1]) if position in levels
    ]
    turn_bytes = max(between, default=0) - kept_bytes - inputs[-1]
    end = ChainUnit(
        forward_s=0.0,
        input_bytes=inputs[-1],
        saved_bytes=0,
        plain_bytes=0,
        saving_bytes=0,
        backward_bytes=0,
        forward_level_bytes=turn_bytes,
        backward_level_bytes=turn_bytes,
    )
    return [*units, end]


def _levels(played: Played) -> tuple[dict[int, int], dict[int, int]]:
    """By segment, its highest level, and that of what is run again before it."""
    levels: dict[int, int] = {}
    again: dict[int, int] = {}
    for moment in played.moments:
        into = again if moment.position.startswith("recomputation of") else levels
        into[moment.segment] = max(into.get(moment.segment, 0), moment.total_bytes)
    return levels, again


def _position(step: CapturedStep, phase: str, unit: str, micro_batch: int | None) -> int:
    return next(
        position
        for position, s in enumerate(step.segments)
        if (s.phase, s.unit, s.micro_batch) == (phase, unit, micro_batch)
    )


def _made_bytes(step: CapturedStep, unit: str, micro_batch: int | None) -> int:
    """What a unit makes for others."""
    made = step.made_by.get((unit, micro_batch), ())
    return sum(tensor.size_bytes for tensor in made if tensor.input_of.keys() - {unit})


def _total(level: Bytes) -> int:
    return sum(level.values())
