"""Units that autograd goes through for a derivative, and again for the loss that is made of it: when copies of what their
forwards keep, made again for the derivative alone, go.

Each goes when the operator's backward that asks for it is over, but for what the derivative's own graph saves. The record has
the last time alone that a tensor was asked for. But the backward of an operator with a graph of its own saves most of what
it asks for, a product's its weight, and operators' backwards come in the reverse order of their forwards: so the others' times
lie between.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memadvisor.analyzers.placement import Passes, Placed
from memadvisor.run.records import Saved

Copies = tuple[tuple[int, int], ...]  # from which segment to which


class _Kept(NamedTuple):
    """What a unit's forward keeps, and when the backward of the derivative saves it anew."""

    number: int  # of the placed storage
    row: Saved
    again_s: Sequence[float]


def earlier_copies(item: Placed, passes: Passes) -> Copies:
    """Of what a unit keeps of its own: from where to where a second run for a derivative has a copy of it."""
    walks = passes.walked.get(item.birth, ())
    if not walks:
        return ()
    starts = [piece.start_s for piece in passes.pieces]
    until_s = [row.released_s for row in _saved_in(item, walks[0], passes) if row.released_s is not None]
    return ((walks[0], max([walks[0], *(bisect_left(starts, time_s) - 1 for time_s in until_s)])),)


def dropped_copies(placed: Sequence[Placed], passes: Passes) -> Mapping[int, Sequence[tuple[float, int]]]:
    """By segment in which a derivative goes through a unit, the copies that go within it: when, and their numbers."""
    kept: dict[int, list[_Kept]] = defaultdict(list)  # by forward segment
    for number, item in enumerate(placed) if passes.walked else ():
        for row in item.saved:
            position = passes.forward_at(row.saved_s)
            if position in passes.walked:
                again = _saved_in(item, passes.walked[position][0], passes)
                kept[position].append(_Kept(number, row, sorted(each.saved_s for each in again)))
    found = {}
    for position, own in kept.items():
        segment = passes.walked[position][0]
        times = _dropped_s(own, passes.pieces[segment].start_s, passes.pieces[segment].end_s)
        found[segment] = [
            (time_s, number)
            for number, time_s in times.items()
            if placed[number].birth == position
            and earlier_copies(placed[number], passes) == ((segment, segment),)
        ]
    return found


def _saved_in(item: Placed, walk: int, passes: Passes) -> list[Saved]:
    """Rows of a storage that were saved while a backward went through the unit of this segment."""
    own = passes.pieces[walk]
    rows = []
    for row in item.saved:
        piece = passes.pieces[passes.segment_at(row.saved_s)]
        if (piece.phase, piece.unit, piece.pass_number) == ("backward", own.unit, own.pass_number):
            rows.append(row)
    return rows


def _dropped_s(kept: Sequence[_Kept], start_s: float, end_s: float) -> dict[int, float]:
    """By number, when the last operator's backward that asks for it is over."""
    known = sorted({time_s for each in kept for time_s in each.again_s})
    asked: list[float | None] = []
    now_s = start_s
    ordered = sorted(kept, key=lambda each: -each.row.saved_s)
    for place, each in enumerate(ordered):
        before = ordered[place - 1].row if place else None
        is_same = before is not None and (before.operator, before.module) == (
            each.row.operator,
            each.row.module,
        )
        at = bisect_left(each.again_s, now_s)
        if at < len(each.again_s):
            now_s = each.again_s[at]
            asked.append(now_s)
        else:
            asked.append(asked[-1] if is_same else None)
    until: dict[int, float] = {}
    later_s = end_s
    for each, time_s in zip(reversed(ordered), reversed(asked), strict=True):
        later_s = later_s if time_s is None else time_s
        at = bisect_right(known, later_s)
        over_s = known[at] if at < len(known) else end_s
        until[each.number] = max(over_s, until.get(each.number, start_s))
    return until
