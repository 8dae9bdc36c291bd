"""Changes of live bytes between a recorded rank and the same with other storages."""

from __future__ import annotations

from collections.abc import Iterator

from memadvisor.analyzers.altered_curve import FOREVER_S
from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun


def changed_lives(before: RankRun, after: RankRun) -> Iterator[tuple[float, int]]:
    """(when, bytes more) of what is gone and of what has come."""
    old, new = set(before.storages), set(after.storages)
    for rows, sign in ((old - new, -1), (new - old, 1)):
        for row in rows:
            yield from _life(row, sign)


def _life(row: Storage, sign: int) -> Iterator[tuple[float, int]]:
    yield row.birth_s, sign * row.size_bytes
    yield FOREVER_S if row.death_s is None else row.death_s, -sign * row.size_bytes
