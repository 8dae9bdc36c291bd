"""When allocations of units' parts come and go (parts.py has the law).

What autograd would keep of a part alone goes at its last use in the run that keeps for the backward. When autograd first
asks for something of the part, it runs again up to the last tensor that it saves; what is not kept then goes at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from memadvisor.cost.allocation_event import BIRTH, DEATH, DEATH_AT_BIRTH, OF_PART, Event
from memadvisor.cost.parts import Part, PartedPass
from memadvisor.cost.step import StepStorage


class OwnOfPart(NamedTuple):
    """A storage that a part sets free: where it goes if nothing is kept, and the segment and time in which it is made again."""

    unsaved: tuple[int, float]
    again: tuple[int, float]

    def unsaved_s(self, item: StepStorage) -> float:
        """When it goes in a second run of its unit: what autocast holds does so as that ends."""
        return self.unsaved[1] if self.unsaved[0] == item.birth_segment else math.inf

    def end(self, place: int, item: StepStorage) -> tuple[int, Event]:
        """In which segment what was made again goes."""
        segment, time_s = max((item.death_segment, item.death_s), self.again)
        return segment, Event(time_s, DEATH, place, OF_PART)


class PartEvents:
    """`own`: by place in the step's storages; `again`: by backward segment when its parts run again, and what that allocates
    and frees."""

    def __init__(self, storages: Sequence[StepStorage], chosen: Collection[PartedPass]) -> None:
        self.own: dict[int, OwnOfPart] = {}
        self.again: dict[int, list[tuple[float, list[Event]]]] = defaultdict(list)
        places = {item.number: place for place, item in enumerate(storages)} if chosen else {}
        made: dict[int, list[tuple[int, StepStorage]]] = defaultdict(list)
        for place, item in enumerate(storages if chosen else ()):
            if item.runs_again:
                made[item.birth_segment].append((place, item))
        for one in chosen:
            inside = made[one.forward]
            for part in one.parts:
                again = one.backward, part.asked_s
                own = {
                    places[storage.number]: OwnOfPart(storage.unsaved, again)
                    for storage in part.storages
                    if storage.number in places
                }
                self.own |= own
                self.again[one.backward].append((part.asked_s, sorted(_run(part, inside, own))))
            self.again[one.backward].sort()


def _run(part: Part, inside: Sequence[tuple[int, StepStorage]], own: Collection[int]) -> Iterator[Event]:
    for place, item in inside:
        if not part.start_s <= item.birth_s <= part.saved_s:
            continue
        yield Event(item.birth_s, BIRTH, place, OF_PART)
        if place not in own:
            is_over = item.death_segment == item.birth_segment and item.death_s <= part.saved_s
            yield Event(item.death_s if is_over else math.inf, DEATH_AT_BIRTH, place, OF_PART)
