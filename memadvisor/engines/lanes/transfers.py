"""When bytes were last moved between a device and another tier: of the last transfers of this process, whoever asked for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# A step of a thousand units that move three tensors each; 100 bytes of each are kept.
_MOST = 10_000


class Moved(NamedTuple):
    """Seconds are of the monotonic clock."""

    lane: str
    kind: str  # "write", "read"
    size_bytes: int
    start_s: float
    end_s: float


_last: deque[Moved] = deque(maxlen=_MOST)


def timed(lane: str, kind: str, size_bytes: int, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, a transfer of so many bytes, that leaves when it was done."""

    def run() -> None:
        start_s = time.monotonic()
        work()
        _last.append(Moved(lane, kind, size_bytes, start_s, time.monotonic()))

    return run


def moved_within(start_s: float, end_s: float) -> list[Moved]:
    """Transfers that began and ended between these moments, in the order of their ends."""
    return [each for each in tuple(_last) if start_s <= each.start_s and each.end_s <= end_s]
