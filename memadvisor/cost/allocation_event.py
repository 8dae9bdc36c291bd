"""What happens to one allocation of a captured step, and when."""

from __future__ import annotations

from typing import NamedTuple

# At the same time deaths come first, but for that of what was born then.
DEATH, BIRTH, DEATH_AT_BIRTH = 0, 1, 2
# Of a forward: the first, the second of the whole unit, the one of a part of it.
FIRST, AGAIN, OF_PART = 0, 1, 2


class Event(NamedTuple):
    """What happens to the storage of a number, as this run of its forward has made it."""

    time_s: float
    kind: int
    number: int
    run: int
