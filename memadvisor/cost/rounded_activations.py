"""Activations that are in a few bits from when they are saved until their backward: what of them is in memory when.

The law of the moments, as memadvisor/engines/activations/compressed_activations.py plays it, storage by storage:

- When the first unit that rounds a storage saves it, its codes come (activation_bits.rounded_bytes; of a mask, one bit
  an element), and for that instant the scratch of rounding beside it. They go with the last that such a unit has saved.
- The original goes at its last use in the forward; later, where somebody else holds it: a unit that saves it as it is, a
  recomputed unit that takes it as input, the script.
- In the backward it is brought back each time that autograd asks for it and it is not there, and goes when what asked
  lets go of it. As long as the original is there, it is used instead.

Moments are those of the traced step, so this is exact as far as an operator's own order is: what a backward has made when
it asks for a tensor is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from memadvisor.activation_bits import (
    MASK_BITS,
    restoring_scratch_bytes,
    rounded_bytes,
    rounding_scratch_bytes,
)

Bytes = Mapping[str, int]  # by category


@dataclass(frozen=True, slots=True)
class Save:
    """A tensor that a unit's forward saves. `rounds`: an engine may round it there."""

    unit: str
    rounds: bool
    saved_s: float
    unpacked_s: float | None
    released_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundableStorage:
    """A storage that autograd keeps, and that an engine may keep in fewer bits; times are those of the traced step.

    `held_until_s`: when the last but autograd lets go of it. `input_until_s`: by unit that takes it as input, until when
    recomputing the unit keeps it. `saves` are in order.
    """

    category: str
    dtype: str
    size_bytes: int
    num_elements: int
    is_mask: bool
    death_s: float
    held_until_s: float
    input_until_s: Mapping[str, float]
    saves: tuple[Save, ...]


class Timed(Protocol):
    """Signed bytes from a moment of the traced step on."""

    @property
    def time_s(self) -> float: ...
    @property
    def delta_bytes(self) -> int: ...
    @property
    def category(self) -> str: ...


class TimedChange(NamedTuple):
    """What rounding itself changes."""

    time_s: float
    delta_bytes: int
    category: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """What comes and goes in one segment, in order, by view of it (cost/step.py's Segment). `asked_s`: when a unit's backward
    first asks for what its forward has kept, if not at its beginning."""

    start_s: float
    views: Mapping[str, Sequence[Timed]]
    asked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingCost:
    """Seconds of rounding a storage and each of its elements, and of bringing it back, as measured in the run."""

    rounding_tensor_s: float
    rounding_element_s: float
    restoring_tensor_s: float
    restoring_element_s: float

    def seconds(self, num_elements: int, *, is_rounding: bool) -> float:
        if is_rounding:
            return self.rounding_tensor_s + num_elements * self.rounding_element_s
        return self.restoring_tensor_s + num_elements * self.restoring_element_s


@dataclass(frozen=True, slots=True)
class _Work:
    time_s: float
    num_elements: int
    is_rounding: bool


class RoundedActivations:
    """Changes against the traced step where units in `bits` round what they keep."""

    def __init__(
        self,
        storages: Sequence[RoundableStorage],
        timelines: Sequence[Timeline],
        bits: Mapping[str, int],
        recomputed: Collection[str],
        device: str,
    ) -> None:
        self._timelines = timelines
        self._starts = [timeline.start_s for timeline in timelines]
        self._inside: dict[int, list[TimedChange]] = {}
        self._work: dict[int, list[_Work]] = {}
        found = [_lives(storage, bits, recomputed, device) for storage in storages if bits]
        for change in sorted((c for changes, _ in found for c in changes), key=lambda change: change.time_s):
            self._inside.setdefault(self._segment_at(change.time_s), []).append(change)
        for work in (w for _, works in found for w in works):
            self._work.setdefault(self._segment_at(work.time_s), []).append(work)

    def _segment_at(self, time_s: float) -> int:
        """The segment that contains a time, or ends at it."""
        return max(0, bisect_left(self._starts, time_s) - 1)

    @cached_property
    def at_start(self) -> list[Bytes]:
        """By segment, what is there when it begins beyond what was captured."""
        levels: list[Bytes] = []
        level: dict[str, int] = {}
        for position in range(len(self._starts)):
            levels.append({category: size for category, size in level.items() if size})
            for change in self._inside.get(position, ()):
                level[change.category] = level.get(change.category, 0) + change.delta_bytes
        return levels

    def changes_in(self, position: int) -> bool:
        return position in self._inside

    def peak(self, position: int, view: str, start: Bytes) -> dict[str, int]:
        """The segment's highest instant, from the level that it was captured to begin with; all of `at_start` counted."""
        level = dict(start)
        for category, size_bytes in self.at_start[position].items():
            level[category] = level.get(category, 0) + size_bytes
        total = most = sum(level.values())
        highest = dict(level)
        captured = self._timelines[position].views[view]
        changes: list[Timed] = [*captured, *self._inside.get(position, ())]
        merged = sorted(changes, key=lambda change: change.time_s)
        for change in merged:
            level[change.category] = level.get(change.category, 0) + change.delta_bytes
            total += change.delta_bytes
            if total > most:
                most, highest = total, dict(level)
        return highest

    def seconds(self, position: int, cost: RoundingCost) -> float:
        """What rounding and bringing back take in a segment."""
        return sum(
            cost.seconds(work.num_elements, is_rounding=work.is_rounding)
            for work in self._work.get(position, ())
        )


def _lives(
    storage: RoundableStorage, bits: Mapping[str, int], recomputed: Collection[str], device: str
) -> tuple[list[TimedChange], list[_Work]]:
    rounding = [save for save in storage.saves if save.rounds and save.unit in bits]
    if not rounding:
        return [], []
    first_s = rounding[0].saved_s
    chosen = MASK_BITS if storage.is_mask else bits[rounding[0].unit]
    size_bytes, count = storage.size_bytes, storage.num_elements
    codes_bytes = rounded_bytes(count, chosen)
    last_s = max(save.released_s for save in rounding)
    changes = [
        TimedChange(first_s, codes_bytes, storage.category),
        *_instant(first_s, rounding_scratch_bytes(count, device)),
        TimedChange(last_s, -codes_bytes, storage.category),
    ]
    works = [_Work(first_s, count, True)]
    held_s = max(first_s, _held_until_s(storage, rounding, recomputed))
    if held_s < storage.death_s:
        changes += [
            TimedChange(held_s, -size_bytes, storage.category),
            TimedChange(storage.death_s, size_bytes, storage.category),
        ]
        for begin_s, end_s in _restored(rounding, held_s):
            changes.append(TimedChange(begin_s, size_bytes, storage.category))
            changes += _instant(begin_s, restoring_scratch_bytes(count, chosen, storage.dtype, device))
            changes.append(TimedChange(end_s, -size_bytes, storage.category))
            works.append(_Work(begin_s, count, False))
    return changes, works


def _instant(time_s: float, size_bytes: int) -> Iterator[TimedChange]:
    yield TimedChange(time_s, size_bytes, "temporary")
    yield TimedChange(time_s, -size_bytes, "temporary")


def _held_until_s(storage: RoundableStorage, rounding: Sequence[Save], recomputed: Collection[str]) -> float:
    """When the last but the units that round it lets go of the original."""
    holds = [storage.held_until_s]
    holds += [s.released_s for s in storage.saves if s not in rounding and s.unit not in recomputed]
    holds += [until for unit, until in storage.input_until_s.items() if unit in recomputed]
    return max(holds)


def _restored(rounding: Sequence[Save], held_s: float) -> Iterator[tuple[float, float]]:
    """From when to when it is there again: one copy serves all who ask while it is there."""
    asked = sorted((s.unpacked_s, s.released_s) for s in rounding if s.unpacked_s is not None)
    current: tuple[float, float] | None = None
    for begin_s, end_s in asked:
        if begin_s <= held_s:
            continue
        if current is not None and begin_s <= current[1]:
            current = current[0], max(current[1], end_s)
            continue
        if current is not None:
            yield current
        current = begin_s, end_s
    if current is not None:
        yield current
