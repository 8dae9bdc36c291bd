"""When a unit's backward first asks for what its forward has kept, and what has come and gone until then.

A recomputed unit runs again there, and not where its backward begins: what asks for nothing, as the backward of a mean, a
sum or an expansion does, has run by then, with nothing there that the unit keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memadvisor.analyzers.levels import Event, apply, highest, plain
from memadvisor.analyzers.placement import Passes, Placed
from memadvisor.cost.level import Level
from memadvisor.run.records import UNEXPLAINED, Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAsked:
    """`kept`: numbers of placed storages that are kept for the unit, whose end before `time_s` is not told as one."""

    start_s: float
    time_s: float
    kept: Collection[int]

    def level(self, start: Mapping[str, int], events: Sequence[Event]) -> Level:
        """Of the segment, with what is told of it from when it asks, and until then."""
        before = [event for event in events if event.time_s < self.time_s]
        told = [event for event in before if self._is_told(event)]
        at_asking, until_asked = dict(start), dict[str, int]()
        apply(at_asking, before)
        apply(until_asked, told)
        return Level(
            start=plain(start),
            peak=highest(start, events),
            peak_unsaved=highest(at_asking, events[len(before) :]),
            until_asked=plain(until_asked),
            most_until_asked=highest({}, told),
        )

    def _is_told(self, event: Event) -> bool:
        """A buffer that is made where the backward begins is not: it stands for gradients that nobody has seen."""
        is_buffer = event.number < 0 and event.category != UNEXPLAINED and event.time_s <= self.start_s
        return not is_buffer and not (event.delta_bytes < 0 and event.number in self.kept)


def first_asked(
    rank_saved: Iterable[Saved], passes: Passes, placed: Iterable[Placed]
) -> dict[int, FirstAsked]:
    """By the first segment of a unit's backward, where it asks within that segment."""
    saved_by: dict[str, list[Saved]] = defaultdict(list)
    for row in rank_saved:
        if row.unpacked_s is not None:
            saved_by[row.unit].append(row)
    kept_for: Mapping[str, set[int]] = defaultdict(set)
    for number, item in enumerate(placed):
        for saved in item.saved:
            kept_for[saved.unit].add(number)
    found = {}
    for forward, (unit, backward) in passes.forward.items():
        ran, piece = passes.pieces[forward], passes.pieces[backward]
        times = [
            row.unpacked_s
            for row in saved_by[unit]
            if row.unpacked_s is not None and ran.start_s <= row.saved_s <= ran.end_s
        ]
        time_s = min(times, default=piece.start_s)
        if piece.start_s < time_s <= piece.end_s:
            found[backward] = FirstAsked(start_s=piece.start_s, time_s=time_s, kept=kept_for[unit])
    return found
