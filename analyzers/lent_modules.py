"""Units of which another unit's forward calls a module: two blocks that hold the same layer.

A layer has its parameters in the unit that holds it first. Where another calls it, an engine that has freed them brings in
all of that unit; what the layer saves there is the other unit's, and made again with it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace

from memadvisor.analyzers.pieces import Piece
from memadvisor.run.records import Unit
from memadvisor.run.run import RankRun

_PHASES = ("forward", "backward")
_FORWARDS = ("forward", "recompute")


def lenders(rank: RankRun, pieces: Sequence[Piece], units: Collection[str]) -> list[tuple[str, ...]]:
    """By piece of the traced step: the others of `units` that operators inside of it are of, in the order of their calls."""
    starts = [piece.start_s for piece in pieces]
    found: list[dict[str, None]] = [{} for _ in pieces]
    for row in rank.operators:
        position = bisect_right(starts, row.start_s) - 1
        if position < 0 or row.unit not in units:
            continue
        piece = pieces[position]
        if piece.unit and piece.phase in _PHASES and piece.unit != row.unit and row.end_s <= piece.end_s:
            found[position].setdefault(row.unit)
    return [tuple(each) for each in found]


def loans_ended(pieces: Sequence[Piece], lent: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """By piece: the units of whose backwards the last one in its micro-batch is that of a call which is lent there."""
    backwards = [(place, piece) for place, piece in enumerate(pieces) if piece.phase == "backward"]
    own = {(piece.micro_batch, piece.unit): place for place, piece in backwards}
    last = {(piece.micro_batch, name): place for place, piece in backwards for name in lent[place]}
    found: list[list[str]] = [[] for _ in pieces]
    for (micro_batch, name), place in last.items():
        if own.get((micro_batch, name), -1) < place:
            found[place].append(name)
    return [tuple(names) for names in found]


def in_order_of_own_calls(
    units: Sequence[Unit], pieces: Sequence[Piece], lent: Sequence[tuple[str, ...]]
) -> tuple[Unit, ...]:
    """Units in order of execution, those that are lent by calls that are not: what comes behind a block, and is brought in or
    waited for there, is no layer that it calls. First come those that have no such call."""
    names = {name for each in lent for name in each}
    forwards = [piece.unit for piece in pieces if piece.phase == "forward"]
    found = [unit for unit in units if unit.name not in names]
    for unit in (each for each in units if each.name in names):
        before = set(forwards[: forwards.index(unit.name)] if unit.name in forwards else ())
        place = max((n + 1 for n, other in enumerate(found) if other.name in before), default=0)
        found.insert(place, unit)
    return tuple(found)


def with_saved_by_callers(rank: RankRun, pieces: Sequence[Piece], units: Collection[str]) -> RankRun:
    """The same with what one of `units` saved in another's forward of the traced step being that other's."""
    starts = [piece.start_s for piece in pieces]

    def caller(unit: str, saved_s: float) -> str:
        position = bisect_left(starts, saved_s) - 1  # a moment between two pieces is the first one's end
        if unit not in units or position < 0:
            return unit
        piece = pieces[position]
        return piece.unit if piece.unit and piece.phase in _FORWARDS else unit

    saved = ((row, caller(row.unit, row.saved_s)) for row in rank.saved)
    return replace(
        rank, saved=tuple(row if row.unit == unit else replace(row, unit=unit) for row, unit in saved)
    )
