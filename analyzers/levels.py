"""Levels of live bytes by category, and what the events of a segment make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from memadvisor.cost.rounded_activations import Timed


class Event(Timed, Protocol):
    """A change of live bytes. `number`: of the placed storage; negative for none."""

    @property
    def number(self) -> int: ...


def apply(level: dict[str, int], events: Iterable[Event]) -> None:
    for event in events:
        level[event.category] = level.get(event.category, 0) + event.delta_bytes


def highest(start: Mapping[str, int], events: Sequence[Event]) -> dict[str, int]:
    """The composition at the highest instant, the first one if there are several."""
    totals = list(accumulate([event.delta_bytes for event in events], initial=sum(start.values())))
    level = dict(start)
    apply(level, events[: totals.index(max(totals))])
    return plain(level)


def missed_by_deaths(
    start: Mapping[str, int], events: Sequence[Event], highest_bytes: int
) -> Iterable[tuple[int, int]]:
    """By number of each storage that dies here: what the highest instant would be above what it is, if it lived on."""
    levels = list(accumulate([event.delta_bytes for event in events], initial=sum(start.values())))
    after = 0
    for event, level in zip(reversed(events), reversed(levels[1:]), strict=True):
        after = max(after, level)
        if event.delta_bytes < 0 and event.number >= 0:
            yield event.number, max(0, after - event.delta_bytes - highest_bytes)


def plain(level: Mapping[str, int]) -> dict[str, int]:
    return {category: size for category, size in level.items() if size}
