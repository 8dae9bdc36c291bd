"""What pieces of states are called that are allocated as one, and the category that each is of."""

from __future__ import annotations

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
