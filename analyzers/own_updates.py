"""Whose update an optimizer makes its temporaries for, in the traced step.

Of all parameters of a group together (foreach), each operator makes one for each of them, in the order in which the
optimizer has them. What is made otherwise is taken for that of a parameter with as many bytes: each operator has made as
many for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from memadvisor.analyzers.pieces import Piece
from memadvisor.cost.fsdp2_sizes import shard_bytes
from memadvisor.cost.own_updates import OwnUpdates, UpdateChanges
from memadvisor.cost.states import UnitStates
from memadvisor.cost.step import STATES
from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun

_FOREACH = "aten::_foreach_"
_NUMBER_BYTES = 16  # of one number of any dtype: a constant, a count of steps


class _Updated(NamedTuple):
    """A parameter's unit, and bytes."""

    unit: str
    size_bytes: int


def own_updates(
    rank: RankRun,
    pieces: Sequence[Piece],
    states: Mapping[str, UnitStates],
    *,
    together: bool,
    sharing: Mapping[str, int] = MappingProxyType({}),
) -> OwnUpdates:
    """By optimizer segment. `together`: some optimizer updates all parameters of a group together. `sharing`: by unit, how
    many ranks share what its parameters were captured as, under the script's FSDP2."""
    updated = _in_order(rank, states, sharing)
    return OwnUpdates(
        {
            position: _changes(_passing(rank, piece), updated, together=together)
            for position, piece in enumerate(pieces)
            if piece.phase == "optimizer"
        }
    )


def _in_order(rank: RankRun, states: Mapping[str, UnitStates], sharing: Mapping[str, int]) -> list[_Updated]:
    """Parameters as optimizers update them, which is the order in which they have made their states."""
    places = {
        name: place for place, name in enumerate(dict.fromkeys(s.parameter for s in rank.optimizer_states))
    }
    found = [
        (places.get(p.name, len(places)), unit, p)
        for unit, own in states.items()
        for p in own.parameters
        if p.requires_grad and p.num_elements
    ]
    found.sort(key=lambda each: each[0])
    return [
        _Updated(unit, shard_bytes(p, sharing[unit]) if unit in sharing else p.size_bytes)
        for _, unit, p in found
    ]


def _passing(rank: RankRun, piece: Piece) -> list[Storage]:
    """What comes and goes in a segment, in order of birth."""
    rows = [
        row
        for row in rank.storages
        if row.device == rank.process.device
        and row.category not in STATES
        and row.death_s is not None
        and piece.start_s <= row.birth_s
        and row.death_s <= piece.end_s
    ]
    return sorted(rows, key=lambda row: row.birth_s)


def _changes(rows: Sequence[Storage], updated: Sequence[_Updated], *, together: bool) -> UpdateChanges:
    told = _told(rows, updated, together=together)
    timed = [
        (time_s, sign > 0, sign * row.size_bytes, number)
        for number, row in enumerate(rows)
        for time_s, sign in ((row.birth_s, 1), (row.death_s or 0.0, -1))
    ]
    own: dict[str, list[tuple[int, int]]] = defaultdict(list)
    untold: list[tuple[int, int]] = []
    anyones: list[tuple[int, int]] = []
    level = highest = 0
    for place, (_, _, delta, number) in enumerate(sorted(timed)):
        level += delta
        highest = max(highest, level)
        if number in told:
            own[told[number]].append((place, delta))
        else:
            (anyones if abs(delta) <= _NUMBER_BYTES else untold).append((place, delta))
    return UpdateChanges(
        own={unit: tuple(changes) for unit, changes in own.items()},
        anyones=tuple(anyones),
        untold=tuple(untold),
        highest_bytes=highest,
    )


def _told(rows: Sequence[Storage], updated: Sequence[_Updated], *, together: bool) -> dict[int, str]:
    """The units that rows are made for, where that can be told."""
    found: dict[int, str] = {}
    runs = _Runs(rows, updated)
    for numbers in _runs(rows):
        found.update(runs.told(numbers))
    owners: dict[int, list[str]] = defaultdict(list)
    for each in updated:
        owners[each.size_bytes].append(each.unit)
    alike: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        if number not in found:
            alike[row.size_bytes, row.operator].append(number)
    for (size_bytes, _), numbers in alike.items():
        own = owners.get(size_bytes, [])
        if size_bytes <= _NUMBER_BYTES:  # of each parameter, but for what is made once
            own = [each.unit for each in updated]
            numbers = numbers if len(numbers) % max(len(own), 1) == 0 else _there_at_once(rows, numbers)
        num_each, rest = divmod(len(numbers), len(own)) if own else (0, 1)
        for place, number in enumerate(numbers if not rest else ()):
            found[number] = own[place % len(own) if together else place // num_each]
    return found


def _there_at_once(rows: Sequence[Storage], numbers: Sequence[int]) -> list[int]:
    """Those that are there when the next one comes, or come while the one before is there."""
    beside = {
        number
        for pair in pairwise(numbers)
        if (rows[pair[0]].death_s or 0.0) > rows[pair[1]].birth_s
        for number in pair
    }
    return [number for number in numbers if number in beside]


def _runs(rows: Sequence[Storage]) -> Iterable[list[int]]:
    """What an operator on lists makes, one after the other, with nothing larger than numbers between."""
    run: list[int] = []
    for number, row in enumerate(rows):
        if run and row.operator == rows[run[-1]].operator:
            run.append(number)
        elif row.operator.startswith(_FOREACH):
            yield run
            run = [number]
        elif row.size_bytes > _NUMBER_BYTES:
            yield run
            run = []
    yield run


class _Runs:
    """Which parameters operators on lists have been for. `_first`, `_behind`: those of the group that is being updated."""

    def __init__(self, rows: Sequence[Storage], updated: Sequence[_Updated]) -> None:
        self._rows = rows
        self._updated = updated
        self._sizes = [each.size_bytes for each in updated]
        self._first = self._behind = 0
        self._free_s = 0.0  # when all that was made for the group is gone

    def told(self, numbers: Sequence[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        if all(self._rows[number].size_bytes <= _NUMBER_BYTES for number in numbers):
            return self._told_numbers(numbers)
        place = 0
        while place < len(numbers):
            first, length = self._longest(numbers[place:])
            for number, each in zip(numbers[place:], self._updated[first : first + length], strict=False):
                found[number] = each.unit
                self._free_s = max(self._free_s, self._rows[number].death_s or 0.0)
            if length:
                self._first, self._behind = first, first + length
            place += max(length, 1)
        return found

    def _told_numbers(self, numbers: Sequence[int]) -> dict[int, str]:
        """Counts and the like, one for each of the group's parameters, or of all."""
        for group in (self._updated[self._first : self._behind], self._updated):
            if len(group) == len(numbers):
                return {number: each.unit for number, each in zip(numbers, group, strict=True)}
        return {}

    def _longest(self, numbers: Sequence[int]) -> tuple[int, int]:
        """The parameters in a row that have as many bytes as most of these, from the first on: their place, and number. Of
        several the group's own, while something of it is there, or else those behind it."""
        sizes = [self._rows[number].size_bytes for number in numbers]
        is_inside = bool(numbers) and self._rows[numbers[0]].birth_s < self._free_s
        likely = [self._first, self._behind] if is_inside else [self._behind, self._first]
        best = (0, 0)
        for first in (*likely, *range(len(self._sizes))):
            length = self._num_alike(first, sizes)
            if length > best[1]:
                best = (first, length)
            if length == len(sizes):
                break
        return best

    def _num_alike(self, first: int, sizes: Sequence[int]) -> int:
        most = min(len(self._sizes) - first, len(sizes))
        return next((n for n in range(most) if self._sizes[first + n] != sizes[n]), most)
