"""Units that autograd goes through for a derivative, and again for the loss that is made of it, or for several losses of one
graph: when copies of what their forwards keep, made again for one backward alone, go.

Each goes when the operator's backward that asks for it is over, but for what the derivative's own graph saves. The record has
the last time alone that a tensor was asked for. But the backward of an operator with a graph of its own saves most of what
it asks for, a product's its weight, and operators' backwards come in the reverse order of their forwards: so the others' times
lie between. Where one graph is gone through twice nothing is saved anew; there operators say which node they are of.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memadvisor.analyzers.placement import Passes, Placed
from memadvisor.run.records import Operator, Saved

Copies = tuple[tuple[int, int], ...]  # from which segment to which


class _Kept(NamedTuple):
    """What a unit's forward keeps, and when the backward of the derivative saves it anew."""

    number: int  # of the placed storage
    row: Saved
    again_s: Sequence[float]


def earlier_copies(item: Placed, passes: Passes) -> Copies:
    """Of what a unit keeps of its own: from where to where a second run has a copy of it, of each backward but the last."""
    starts = [piece.start_s for piece in passes.pieces] if item.birth in passes.walked else []
    found = []
    for walk in passes.walked.get(item.birth, ())[:-1]:
        until_s = [row.released_s for row in _saved_in(item, walk, passes) if row.released_s is not None]
        found.append((walk, max([walk, *(bisect_left(starts, time_s) - 1 for time_s in until_s)])))
    return tuple(found)


def dropped_copies(
    placed: Sequence[Placed], passes: Passes, operators: Sequence[Operator]
) -> Mapping[int, Sequence[tuple[float, int]]]:
    """By segment in which a backward goes through a unit that another one goes through later, the copies that go within it:
    when, and their numbers."""
    kept: dict[int, list[_Kept]] = defaultdict(list)  # by the segment of that backward
    for number, item in enumerate(placed) if passes.walked else ():
        for row in item.saved:
            forward = passes.forward_at(row.saved_s)
            for walk in () if forward is None else passes.walked.get(forward, ())[:-1]:
                again = _saved_in(item, walk, passes)
                kept[walk].append(_Kept(number, row, sorted(each.saved_s for each in again)))
    ends = _ends_of_nodes(operators) if kept else {}
    found = {}
    for segment, own in kept.items():
        start_s, end_s = passes.pieces[segment].start_s, passes.pieces[segment].end_s
        if any(each.again_s for each in own):
            times = _dropped_s(own, start_s, end_s)
        else:
            times = _over_s(own, ends, start_s, end_s)
        found[segment] = [
            (time_s, number)
            for number, time_s in times.items()
            if (segment, segment) in earlier_copies(placed[number], passes)
        ]
    return found


def _ends_of_nodes(operators: Sequence[Operator]) -> Mapping[int, Sequence[float]]:
    """By node, when operators of a backward were over that are of it."""
    found: dict[int, list[float]] = defaultdict(list)
    for operator in operators:
        if operator.phase == "backward" and operator.node is not None:
            found[operator.node].append(operator.end_s)
    return {node: sorted(ends_s) for node, ends_s in found.items()}


def _over_s(
    kept: Sequence[_Kept], ends: Mapping[int, Sequence[float]], start_s: float, end_s: float
) -> dict[int, float]:
    """By number, when the last node that asks for it is over, in this time."""
    until: dict[int, float] = {}
    for each in kept:
        known = ends.get(each.row.node, ()) if each.row.node is not None else ()
        at = bisect_right(known, end_s) - 1
        over_s = known[at] if at >= 0 and known[at] > start_s else end_s
        until[each.number] = max(over_s, until.get(each.number, start_s))
    return until


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
