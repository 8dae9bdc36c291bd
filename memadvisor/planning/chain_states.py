"""States of a dynamic programme over the units of a chain, from the first to the last: what has been added, and is freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Way = TypeVar("Way")

_MAX_STATES = 4000  # kept after each unit; reached only where hundreds of units all differ


@dataclass(slots=True)  # not frozen: so many are made that it would show
class State(Generic[Way]):
    """`previous` and `taken`, what the last unit does, lead back to all that was chosen."""

    added_s: float
    freed_bytes: int
    previous: State[Way] | None
    taken: Way | None

    def ways(self) -> list[Way | None]:
        """Of all units, in order."""
        found: list[Way | None] = []
        state = self
        while state.previous is not None:
            found.append(state.taken)
            state = state.previous
        return found[::-1]


def undominated(states: list[State[Way]]) -> list[State[Way]]:
    """Keep a state only if no other is as fast and frees as much."""
    states.sort(key=lambda s: (s.added_s, -s.freed_bytes))
    kept: list[State[Way]] = []
    for state in states:
        if not kept or state.freed_bytes > kept[-1].freed_bytes:
            kept.append(state)
    if len(kept) > _MAX_STATES:
        stride = len(kept) / _MAX_STATES
        kept = [kept[int(i * stride)] for i in range(_MAX_STATES - 1)] + [kept[-1]]
    return kept
