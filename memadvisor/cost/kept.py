"""What an operator's output takes and spares that a recomputed unit keeps, though it keeps little else.

The forward that keeps nothing, and the run again, are each cut where something that may be kept dies or comes into
being; of each stretch the highest level is known. So the highest level for any choice is a maximum over sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Bytes = Mapping[str, int]  # by category


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepableStorage:
    """One storage that an operator makes.

    `death_segment`: where the backward lets go of it; None for one that autograd does not keep, which a run again
    needs and then drops.
    """

    category: str
    size_bytes: int
    death_segment: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepableOperator:
    """An operator of a unit's forward, with those in place on its output that follow it at once.

    `name`: `aten::addmm#1` is the second call of aten::addmm in the forward. `seconds`: what it takes, as a part of
    the forward's duration. `is_random`: it draws numbers.
    """

    name: str
    seconds: float
    is_random: bool
    storages: tuple[KeepableStorage, ...]

    @property
    def size_bytes(self) -> int:
        return sum(storage.size_bytes for storage in self.storages)


@dataclass(frozen=True, slots=True)
class _Change:
    """A storage of an operator (its place among them) that comes into being, or dies."""

    operator: int
    category: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """The highest level between changes; `inside`: the operator that was running, if it may be kept."""

    highest: Bytes
    num_changes: int  # that have come before it
    inside: int | None = None


@dataclass(frozen=True, kw_only=True)
class ForwardOperators:
    """What may be kept of one forward of a unit that is recomputed.

    `forward`: the levels of the first run if it keeps nothing; `deaths`: when keepable storages die in it. `again`:
    what the run again brings into being, beside what was there; `births`: when keepable storages come. `late`: names of
    operators behind the last tensor that is saved, whose outputs are held to the first run's end where a plan names them;
    their places come after those of `operators`.
    """

    operators: tuple[KeepableOperator, ...]
    forward: tuple[Stretch, ...]
    deaths: tuple[_Change, ...]
    again: tuple[Stretch, ...]
    births: tuple[_Change, ...]
    late: tuple[str, ...] = ()

    @cached_property
    def place_of(self) -> Mapping[str, int]:
        return {operator.name: place for place, operator in enumerate(self.operators)}

    def places(self, names: Collection[str]) -> frozenset[int]:
        """Of those operators that a plan names. A name without number stands for all calls."""
        return _named(names, [operator.name for operator in self.operators])

    def held(self, names: Collection[str]) -> frozenset[int]:
        """Of those, with the late ones, whose outputs the first run holds."""
        return _named(names, [*(operator.name for operator in self.operators), *self.late])

    def seconds(self, places: Collection[int]) -> float:
        return sum(self.operators[place].seconds for place in places)

    def bytes_kept(self, places: Collection[int]) -> int:
        return sum(self.operators[place].size_bytes for place in places)

    def storages(self, places: Collection[int]) -> list[KeepableStorage]:
        return [storage for place in places for storage in self.operators[place].storages]

    def forward_peak(self, places: Collection[int]) -> dict[str, int]:
        """The highest level of the first run, everything that is alive counted."""
        return _highest(self.forward, self.deaths, places, 1)

    def growth(self, places: Collection[int]) -> dict[str, int]:
        """What the run again adds at its highest instant to the level that it begins with."""
        outside = [stretch for stretch in self.again if stretch.inside not in places]
        return _highest(outside, self.births, places, -1)


def _named(names: Collection[str], calls: Sequence[str]) -> frozenset[int]:
    wanted = set(names)
    return frozenset(
        place for place, call in enumerate(calls) if call in wanted or call.partition("#")[0] in wanted
    )


def _highest(
    stretches: Sequence[Stretch], changes: Sequence[_Change], places: Collection[int], sign: int
) -> dict[str, int]:
    """The highest stretch, once what is kept has been added, or taken off, from its change on."""
    held: dict[str, int] = {}
    total_bytes = num_changes = 0
    best: tuple[int, Bytes, dict[str, int]] | None = None
    for stretch in stretches:
        for change in changes[num_changes : stretch.num_changes]:
            if change.operator in places:
                held[change.category] = held.get(change.category, 0) + sign * change.size_bytes
                total_bytes += sign * change.size_bytes
        num_changes = stretch.num_changes
        reached = sum(stretch.highest.values()) + total_bytes
        if best is None or reached > best[0]:
            best = reached, stretch.highest, dict(held)
    if best is None:
        return {}
    return {c: best[1].get(c, 0) + best[2].get(c, 0) for c in {**best[1], **best[2]}}


@dataclass(frozen=True, slots=True)
class Event:
    """A change of live bytes in a forward. `operator`: whose keepable output comes, or goes."""

    delta_bytes: int
    category: str
    operator: int | None = None


def cut(
    start: Bytes, events: Sequence[Event | int], *, at_births: bool
) -> tuple[tuple[Stretch, ...], tuple[_Change, ...]]:
    """The stretches between the births of keepable storages, or between their deaths.

    Among the events stand, as numbers, where an operator begins (its place) and ends (-1).
    """
    level = dict(start)
    total_bytes = highest_bytes = sum(level.values())
    highest, inside = dict(level), None
    stretches: list[Stretch] = []
    changes: list[_Change] = []

    def close() -> None:
        nonlocal highest, highest_bytes
        stretches.append(Stretch({c: n for c, n in highest.items() if n}, len(changes), inside))
        highest, highest_bytes = dict(level), total_bytes

    for event in events:
        if isinstance(event, int):
            close()
            inside = event if event >= 0 else None
            continue
        is_cut = event.operator is not None and (event.delta_bytes > 0) == at_births
        if is_cut:
            close()
        level[event.category] = level.get(event.category, 0) + event.delta_bytes
        total_bytes += event.delta_bytes
        if is_cut and event.operator is not None:
            changes.append(_Change(event.operator, event.category, abs(event.delta_bytes)))
            highest, highest_bytes = dict(level), total_bytes
        elif total_bytes > highest_bytes:
            highest, highest_bytes = dict(level), total_bytes
    close()
    return tuple(stretches), tuple(changes)
