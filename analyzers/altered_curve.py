"""The bytes of the traced step as they would have been with some storages born or gone at other moments."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.run.records import Storage

FOREVER_S = math.inf  # no moment of the step


def moved_death(storage: Storage, until_s: float) -> list[tuple[float, int]]:
    """Changes of live bytes where a storage goes at `until_s` in place of when it went."""
    death_s = FOREVER_S if storage.death_s is None else storage.death_s
    return [(until_s, -storage.size_bytes), (death_s, storage.size_bytes)]


class AlteredCurve:
    """The measured curve plus changes of bytes, each (moment on the process's clock, bytes); changes at FOREVER_S never
    happen."""

    def __init__(self, timeline: MemoryTimeline, changes: Iterable[tuple[float, int]]) -> None:
        finite = sorted(change for change in changes if change[0] != FOREVER_S)
        self._change_s = np.array([time_s for time_s, _ in finite])
        deltas = np.array([delta_bytes for _, delta_bytes in finite], dtype=np.int64)
        self._sums = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(deltas)))
        self._old_s, self._old_bytes = timeline.clock_s, timeline.total_bytes

    def highest(self) -> tuple[int, float]:
        """The highest level, and when."""
        times_s = np.union1d(self._old_s, self._change_s[self._change_s >= self._old_s[0]])
        positions = np.searchsorted(self._old_s, times_s, side="right") - 1
        levels = (
            self._old_bytes[positions] + self._sums[np.searchsorted(self._change_s, times_s, side="right")]
        )
        index = int(np.argmax(levels))
        return int(levels[index]), float(times_s[index])

    def before(self, time_s: float) -> int:
        """The level just before a moment."""
        position = max(0, int(np.searchsorted(self._old_s, time_s, side="left")) - 1)
        change_bytes = self._sums[np.searchsorted(self._change_s, time_s, side="left")]
        return int(self._old_bytes[position]) + int(change_bytes)

    def change_at(self, time_s: float) -> int:
        """New level less old one at a moment; what happens at that very moment has happened."""
        return int(self._sums[np.searchsorted(self._change_s, time_s, side="right")])
