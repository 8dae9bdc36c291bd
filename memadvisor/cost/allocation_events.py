"""When each allocation of a captured step comes and goes, segment by segment, with what a plan changes of that.

A unit that is recomputed frees what it keeps at its last use in the forward. It runs again where its backward first asks
for something of that, and not where that begins, if the step tells; what it has made then lives as it was captured. Parts
of units do the same by themselves, of the forward or of the unit's second run (parts.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Protocol

from memadvisor.cost.activation_changes import needed_for_second_run, needed_until
from memadvisor.cost.allocation_event import AGAIN, BIRTH, DEATH, DEATH_AT_BIRTH, FIRST, Event
from memadvisor.cost.moved_activations import Absence
from memadvisor.cost.part_events import PartEvents
from memadvisor.cost.parted_units import units_holding
from memadvisor.cost.parts import PartedPass
from memadvisor.cost.step import StepStorage
from memadvisor.cost.stretches import Stretches


class Stretch(Protocol):
    """What this file needs of a segment."""

    @property
    def phase(self) -> str: ...
    @property
    def unit(self) -> str | None: ...
    @property
    def pass_number(self) -> int | None: ...


class StepEvents:
    """`of` each segment, in order; `again`: by backward segment, what the run again allocates and frees before the backward
    goes on, and `asked_s`, when that is, where it is known. `of_parts`: the same of `parts`, each with when that is."""

    def __init__(
        self,
        storages: Sequence[StepStorage],
        segments: Sequence[Stretch],
        recomputed: Collection[str],
        absences: Mapping[int, Absence],
        asked_s: Mapping[int, float],
        parts: Collection[PartedPass] = (),
    ) -> None:
        self._storages = storages
        of_parts = PartEvents(storages, parts)
        self._own_of_parts, self.of_parts = of_parts.own, of_parts.again
        self.of: list[list[Event]] = [[] for _ in segments]
        self.again: dict[int, list[Event]] = {}
        self.asked_s = asked_s
        forwards = {
            (segment.unit, segment.pass_number): position
            for position, segment in enumerate(segments)
            if segment.phase == "forward" and segment.unit in recomputed
        }
        backwards = {
            position: forwards[segment.unit, segment.pass_number]
            for position, segment in enumerate(segments)
            if segment.phase == "backward" and (segment.unit, segment.pass_number) in forwards
        }
        firsts = {forward: position for position, forward in reversed(backwards.items())}
        again = self._reruns({forward: unit or "" for (unit, _), forward in forwards.items()}, firsts)
        for position, forward in backwards.items():
            self.again[position] = again[forward]
        self._place(frozenset(recomputed), units_holding(parts))
        for number, absence in absences.items():
            if absence.is_away:  # from the end of the segment before to that of the last one
                self.of[absence.first - 1].append(Event(math.inf, DEATH, number, FIRST))
                self.of[absence.last].append(Event(math.inf, BIRTH, number, FIRST))
        for events in self.of:
            events.sort()

    def _place(self, recomputed: frozenset[str], holding: Set[str]) -> None:
        """Put births and deaths on the segments, as they are when these units are recomputed, and parts of those hold what
        they are called with."""
        alone = Stretches.alone(recomputed)
        for number, item in enumerate(self._storages):
            if item.birth_segment >= 0:
                self.of[item.birth_segment].append(Event(item.birth_s, BIRTH, number, FIRST))
            elif item.comes is not None:
                self.of[item.comes[0]].append(Event(item.comes[1], BIRTH, number, FIRST))
            death, own = (item.death_segment, item.death_s), self._own_of_parts.get(number)
            if own is not None:
                segment, end = own.end(number, item)
                if segment < len(self.of):
                    self.of[segment].append(end)
                death = item.unsaved_death if item.freed_by in recomputed else own.unsaved
            elif item.freed_by in recomputed:
                if item.death_segment < len(self.of):
                    asked_s = self.asked_s.get(item.death_segment, -math.inf)
                    made_again = item.death_segment in self.again
                    # What autograd had let go of by then is made again all the same.
                    end_s = max(item.death_s, asked_s) if made_again else item.death_s
                    self.of[item.death_segment].append(Event(end_s, DEATH, number, AGAIN))
                death = item.unsaved_death
            elif item.boundary is not None:
                boundary = item.boundary
                needed = needed_until(boundary, alone, maker=None)  # none makes its own input
                death = death if needed == item.death_segment else (needed, math.inf)
                if needed in self.again and needed_for_second_run(boundary, alone, needed, holding):
                    self.again[needed].append(Event(math.inf, DEATH, number, FIRST))
                    continue
            if death[0] < len(self.of):
                at_birth = death == (item.birth_segment, item.birth_s)
                kind = DEATH_AT_BIRTH if at_birth or own is not None else DEATH
                self.of[death[0]].append(Event(death[1], kind, number, FIRST))

    def _reruns(self, forwards: Mapping[int, str], backwards: Mapping[int, int]) -> dict[int, list[Event]]:
        """By forward segment, what running it again allocates, and frees before the backward goes on. `forwards`: with their
        units; `backwards`: the segment that each runs again for."""
        again: dict[int, list[Event]] = defaultdict(list)
        for number, item in enumerate(self._storages):
            if item.birth_segment not in forwards or not item.runs_again:
                continue
            events = again[item.birth_segment]
            events.append(Event(item.birth_s, BIRTH, number, AGAIN))
            if (own := self._own_of_parts.get(number)) is not None:
                events.append(Event(own.unsaved_s(item), DEATH_AT_BIRTH, number, AGAIN))
            elif (until := _saved_again(item, forwards[item.birth_segment])) in range(
                backwards.get(item.birth_segment, len(self.of)), len(self.of)
            ):
                end_s = max(item.death_s, self.asked_s.get(until, -math.inf))
                self.of[until].append(
                    Event(end_s if until == item.death_segment else math.inf, DEATH, number, AGAIN)
                )
            elif item.freed_by is None:
                end_s = item.death_s if item.death_segment == item.birth_segment else math.inf
                events.append(Event(end_s, DEATH_AT_BIRTH, number, AGAIN))
        for events in again.values():
            events.sort()
        return again


def _saved_again(item: StepStorage, unit: str) -> int:
    """The segment in which a unit that runs again lets go of what it makes for others too, and saves itself; -1: of none."""
    return -1 if item.boundary is None else item.boundary.saved_until.get(unit, -1)


def heirs(storages: Sequence[StepStorage]) -> dict[int | None, StepStorage]:
    """What has the memory, in steps that are not traced, of one that ends at the very moment in which this begins. In a
    traced step it is made beside that, which its account leaves out."""
    found: dict[int | None, StepStorage] = {}
    for item in storages:
        if item.in_place_of is not None:
            old = storages[item.in_place_of]
            if (old.death_segment, old.death_s) == (item.birth_segment, item.birth_s):
                found[item.in_place_of] = item
    return found


def renewed_storages(
    storages: Sequence[StepStorage], num_segments: int, is_modelled: Callable[[StepStorage], bool]
) -> dict[int, list[int]]:
    """What the step finds and frees, with what it leaves in its place.

    First by category and size, one for one; then by size alone, as a batch is an input where a model is called with it,
    and nothing in the next step; what remains of a category goes all together with the first of it.
    """
    found: list[int] = []
    left: list[int] = []
    for number, item in enumerate(storages):
        if is_modelled(item):
            continue
        if item.birth_segment < 0 and item.death_segment < num_segments:
            found.append(number)
        elif item.birth_segment >= 0 and item.death_segment >= num_segments:
            left.append(number)
    found.sort(key=lambda number: (storages[number].death_segment, storages[number].death_s))
    renewed: dict[int, list[int]] = {}
    for key_of in (_category_and_size, _size):
        by_key: dict[object, list[int]] = defaultdict(list)
        for number in left:
            by_key[key_of(storages[number])].append(number)
        for number in (number for number in found if number not in renewed):
            if alike := by_key[key_of(storages[number])]:
                renewed[number] = [alike.pop(0)]
        left = sorted(number for alike in by_key.values() for number in alike)
    rest: dict[str, list[int]] = defaultdict(list)
    for number in left:
        rest[storages[number].category].append(number)
    for number in found:
        category = storages[number].category
        if number not in renewed and category in rest:
            renewed[number], rest[category] = rest[category], []
    return renewed  # what else is found was there from the start


def _category_and_size(item: StepStorage) -> object:
    return item.category, item.size_bytes


def _size(item: StepStorage) -> object:
    return item.size_bytes
