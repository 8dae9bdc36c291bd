"""The fastest nested recomputation of a chain of units within a memory budget (Rotor, arXiv:1911.13214).

A schedule of a chain is a *body*: what its forward does, from first unit to last. An item is a unit that
keeps all that its backward needs, or a `Stretch` of units of which only the input is kept; before the
stretch's backward its forward runs again, by a body of its own, in which stretches may be again. These are
the schedules that keep what they have decided to keep until the backward needs it, and run nothing again
sooner than the next backward does; among them the programme finds the fastest one.

T(m, a, b) is the least time of forwards to take units a..b forward and backward, where m bytes are free beside
the input of a. It is the better of
- units a..j-1 as a stretch, for some j: their forwards + T(m - input of j, j, b) + T(m, a, j-1);
- a keeping all: its forward + T(m - saved by a, a+1, b), or with a = b its forward alone;
as far as each forward and backward on the way fits into m. Each backward runs once in any case, so its
time is left out. O(L^3) slots of memory, all slots and all j of one pair (a, b) at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainUnit:
    """A unit of a chain, in bytes beyond its input and in seconds of its forward.

    input_bytes: what keeping its input takes; of the chain's first unit it is not counted. saved_bytes: what is
    there after a forward that keeps all for the backward, output included. plain_bytes and saving_bytes: the highest
    instant of a forward that keeps nothing but its output, and of one that keeps all. backward_bytes: the highest
    instant of its backward, beyond the input and what was saved.
    forward_level_bytes: what else is there in the step's first forward of it. backward_level_bytes: what else is there
    before its backward, when stretches that end with it are run again, and in its backward.
    """

    forward_s: float
    input_bytes: int
    saved_bytes: int
    plain_bytes: int
    saving_bytes: int
    backward_bytes: int
    forward_level_bytes: int = 0
    backward_level_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Units first..last, of which the input alone is kept; `body` says how they are run again."""

    first: int
    last: int
    body: Body


Body = tuple["int | Stretch", ...]


class Chain:
    """The programme's table for a chain and up to `memory_bytes`; each budget below that is then read off.

    The last unit, whose backward follows its forward at once, always keeps all. Bytes are counted in slots, rounded
    up, so that what fits in slots fits.
    """

    def __init__(self, units: Sequence[ChainUnit], memory_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        self.units = tuple(units)
        levels = [u.forward_level_bytes for u in units] + [u.backward_level_bytes for u in units]
        self._floor_bytes = min(levels)  # in all levels, so that slots are spent on what differs
        self._slot_bytes = max(1, -(-(memory_bytes - self._floor_bytes) // num_slots))
        self._num_slots = max(0, (memory_bytes - self._floor_bytes) // self._slot_bytes)
        self._inputs = [self._slots(unit.input_bytes) for unit in units]
        self._saved = [self._slots(unit.saved_bytes) for unit in units]
        self._backward = [
            self._slots(u.backward_level_bytes - self._floor_bytes + u.saved_bytes + u.backward_bytes)
            for u in units
        ]
        self._rises = self._rises_of_plain([0] * len(self.units))
        forward_levels = [unit.forward_level_bytes - self._floor_bytes for unit in units]
        self._rises_whole = self._rises_of_plain(forward_levels)  # to the chain's last unit
        self._ends_s = np.cumsum([0.0, *(unit.forward_s for unit in units)])
        self._fill()

    def _slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self._slot_bytes)

    def _fill(self) -> None:
        count, width = len(self.units), self._num_slots + 1
        self._best = [
            np.empty((count - first, width)) for first in range(count)
        ]  # by first, from it on by last
        # For the part behind a stretch: the same less the input of the first unit, and with all forwards up to that one,
        # of which the stretch's are a difference. By last, up to it by first.
        self._behind = [np.full((last + 1, width), np.inf) for last in range(count)]
        self._rows = np.empty((count, width))  # of one pair, for all j
        for last in range(count):
            for first in range(last, -1, -1):
                best = self._best[first][last - first]
                self._keeping(first, last, best)
                if first < last:
                    np.minimum(best, self._stretching(first, last), out=best)
                behind = self._behind[last][first]
                _shift(best, self._inputs[first], behind)
                behind += self._ends_s[first]

    def _keeping(self, first: int, last: int, into: NDArray[Any]) -> None:
        """With `first` keeping all that its backward needs."""
        into[:] = np.inf if first < last else 0.0
        if first < last:
            _shift(self._best[first + 1][last - first - 1], self._saved[first], into)
        into += self.units[first].forward_s
        into[: max(0, self._need_keeping(first, last))] = np.inf

    def _stretching(self, first: int, last: int) -> NDArray[Any]:
        """With units first..j-1 as a stretch, for the best j."""
        least: NDArray[Any] = self._stretches(first, last).min(axis=0)
        least -= self._ends_s[first]
        return least

    def _stretches(self, first: int, last: int) -> NDArray[Any]:
        """The same for each j in first+1..last, a row each until the next call; later by all forwards before `first`."""
        found = self._rows[: last - first]
        np.add(self._behind[last][first + 1 : last + 1], self._best[first][: last - first], out=found)
        for start, needed in self._needs_stretching(first, last):
            found[start:, : max(0, needed)] = np.inf
        return found

    def _needs_stretching(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """From which j on, counted from first+1, the stretch needs how many slots: ever more."""
        is_whole = last == len(self.units) - 1
        level_bytes = 0 if is_whole else self._level_bytes(first, last)
        for start, size_bytes in self._rises_whole[first] if is_whole else self._rises[first]:
            if start >= last - first:
                break
            yield start, self._slots(size_bytes + level_bytes)

    def _need_keeping(self, unit: int, last: int) -> int:
        u = self.units[unit]
        forward = self._slots(self._level_bytes(unit, last) + u.saving_bytes)
        return max(forward, self._backward[unit])

    def _rises_of_plain(self, levels_bytes: Sequence[int]) -> list[list[tuple[int, int]]]:
        """By `first`, what forwards that keep nothing need, from it to each unit behind it: where, counted from it, that
        rises, and to how much. Each has its own input too, if that is not what the part begins with."""
        found: list[list[tuple[int, int]]] = []
        for first in range(len(self.units)):
            rises: list[tuple[int, int]] = []
            for place, (unit, level_bytes) in enumerate(
                zip(self.units[first:], levels_bytes[first:], strict=True)
            ):
                size_bytes = unit.plain_bytes + (unit.input_bytes if place else 0) + level_bytes
                if not rises or size_bytes > rises[-1][1]:
                    rises.append((place, size_bytes))
            found.append(rises)
        return found

    def _level_bytes(self, unit: int, last: int) -> int:
        """What else is there: the chain's last unit is reached in the first forward alone."""
        if last == len(self.units) - 1:
            return self.units[unit].forward_level_bytes - self._floor_bytes
        return self.units[last].backward_level_bytes - self._floor_bytes

    def times_s(self) -> NDArray[Any]:
        """Least time of all forwards by number of slots; infinite where nothing fits."""
        times: NDArray[Any] = self._best[0][-1]
        return times

    def budgets(self) -> list[int]:
        """The budgets that are worth having, in bytes: each a slot less, and forwards take longer. Most first."""
        times = self.times_s()
        slower = [slots for slots in range(1, self._num_slots + 1) if times[slots - 1] > times[slots]]
        lowest = [0] if np.isfinite(times[0]) else []
        return [self._floor_bytes + slots * self._slot_bytes for slots in (*reversed(slower), *lowest)]

    def body(self, budget_bytes: int) -> Body | None:
        """The fastest schedule within a budget of at most the table's memory; None where nothing fits."""
        slots = min(self._num_slots, (budget_bytes - self._floor_bytes) // self._slot_bytes)
        if slots < 0 or not np.isfinite(self.times_s()[slots]):
            return None
        return self._body(slots, 0, len(self.units) - 1)

    def _body(self, slots: int, first: int, last: int) -> Body:
        """Read the choices off the table again."""
        items: list[int | Stretch] = []
        while first <= last:
            following = self._best_stretch(slots, first, last)
            if following is not None:
                items.append(Stretch(first, following - 1, self._body(slots, first, following - 1)))
                slots -= self._inputs[following]
                first = following
            else:
                items.append(first)
                slots -= self._saved[first]
                first += 1
        return tuple(items)

    def _best_stretch(self, slots: int, first: int, last: int) -> int | None:
        """The best j; None where `first` is to keep all: `_keeping` and `_stretches` of one number of slots."""
        if first == last:
            return None
        stretched_s = (
            self._behind[last][first + 1 : last + 1, slots] + self._best[first][: last - first, slots]
        )
        for start, needed in self._needs_stretching(first, last):
            if slots < needed:
                stretched_s[start:] = np.inf
        kept_s = math.inf
        if slots >= max(self._saved[first], self._need_keeping(first, last)):
            kept_s = self._best[first + 1][last - first - 1, slots - self._saved[first]]
            kept_s += self.units[first].forward_s
        best = int(stretched_s.argmin())
        return first + 1 + best if stretched_s[best] - self._ends_s[first] < kept_s else None


def above_floor(units: Sequence[ChainUnit]) -> tuple[tuple[ChainUnit, ...], int]:
    """The same chain without what is there at all times, and how many bytes that is."""
    floor_bytes = min(min(u.forward_level_bytes, u.backward_level_bytes) for u in units)
    return tuple(
        replace(
            unit,
            forward_level_bytes=unit.forward_level_bytes - floor_bytes,
            backward_level_bytes=unit.backward_level_bytes - floor_bytes,
        )
        for unit in units
    ), floor_bytes


def _shift(values: NDArray[Any], slots: int, into: NDArray[Any]) -> None:
    """Values with so many slots less."""
    if slots < len(values):
        into[slots:] = values[: len(values) - slots]
