"""Units of which another unit's forward calls a module: two blocks that hold the same layer.

A layer has its parameters in the unit that holds it first. Where another calls it, an engine that has freed them brings in
all of that unit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from memadvisor.analyzers.pieces import Piece
from memadvisor.run.run import RankRun

_PHASES = ("forward", "backward")


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
