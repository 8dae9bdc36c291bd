"""What units are called with, where a hook of the module casts it first, as FSDP2 does with mixed precision.

A unit that runs again is called with the cast, which is kept for that, and nothing is cast again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from memadvisor.run.records import CallTensor, ModuleCall
from memadvisor.run.run import RankRun

_CAST = "aten::_to_copy"


@dataclass(frozen=True, slots=True)
class CastArguments:
    """`casts`: storages of the casts. `spans`: from when a call began to when its last cast was over, in order."""

    casts: frozenset[int]
    spans: tuple[tuple[float, float], ...]

    def has(self, time_s: float | None) -> bool:
        """Whether what is used then is used by such a cast."""
        place = -1 if time_s is None else bisect_left(self.spans, (time_s,)) - 1
        return time_s is not None and place >= 0 and time_s <= self.spans[place][1]


def cast_arguments(rank: RankRun, late_inputs: Iterable[tuple[ModuleCall, CallTensor]]) -> CastArguments:
    """Of calls of units, with what came to each after it had begun."""
    made_s = {row.storage_id: row.birth_s for row in rank.storages if row.operator == _CAST}
    found = [(call, row.storage_id) for call, row in late_inputs if row.storage_id in made_s]
    if not found:
        return CastArguments(frozenset(), ())
    over_s = sorted(row.end_s for row in rank.operators if row.name == _CAST)
    ends: dict[float, float] = {}
    for call, storage_id in found:
        place = bisect_left(over_s, made_s[storage_id])
        end_s = over_s[place] if place < len(over_s) else made_s[storage_id]
        ends[call.start_s] = max(end_s, ends.get(call.start_s, end_s))
    return CastArguments(frozenset(storage_id for _, storage_id in found), tuple(sorted(ends.items())))
