"""What pieces of states are called that are allocated as one, and the category and the stream that each is of."""

from __future__ import annotations

from collections.abc import Mapping

STAND_IN = "stand-in parameter"  # all blocks that stand for a unit's released parameters

_CATEGORIES = {
    "gathered": "parameter",
    "second copy": "parameter",
    "messages": "communication",
    "all-reduced": "communication",
    "staging": "communication",
    "residual": "communication",
    "code tables": "other",
    "late gradients": "gradient",
}


def category_of(what: str) -> str:
    """Of a piece, by what it is: where it is none of these, the last of its words says it."""
    return _CATEGORIES.get(what) or what.rpartition(" ")[2]


def stream_of(piece: tuple[str, str], streams: Mapping[tuple[str, str], int]) -> int:
    """Whose memory a piece is: `streams` by what it is and how its name begins, 0 of the others."""
    what, where = piece
    return next((s for (kind, begin), s in streams.items() if what == kind and where.startswith(begin)), 0)
