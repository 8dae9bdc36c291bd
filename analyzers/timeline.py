"""What was in memory when: the traced step's bytes by category, as exact step functions of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memadvisor.run.records import CATEGORIES, UNEXPLAINED
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Bytes alive on the rank's own device over the traced step, by category.

    `times_s` ascend, in seconds since the step began; entry i of each array holds from `times_s[i]` to
    `times_s[i + 1]`, and the last one at the step's end. `by_category_bytes` has all CATEGORIES and
    `unexplained` (what the allocator reports beyond the storages; may be negative); they sum to `total_bytes`.
    """

    start_s: float  # the step's start on the process's clock
    clock_s: NDArray[np.float64]  # `times_s` on the process's clock, exactly as in the records
    times_s: NDArray[np.float64]
    by_category_bytes: dict[str, NDArray[np.int64]]
    total_bytes: NDArray[np.int64]


def memory_timeline(rank: RankRun) -> MemoryTimeline | None:
    """Sum storages from birth to death, and add the residuals. None when no step was traced.

    A storage counts at its birth and no longer at its death. Storages on other devices do not count.
    """
    step = rank.traced_step
    if step is None or not rank.storages:
        return None
    storages = [storage for storage in rank.storages if storage.device == rank.process.device]
    changes: dict[str, list[tuple[float, int]]] = {name: [] for name in (*CATEGORIES, UNEXPLAINED)}
    for storage in storages:
        category = storage.category if storage.category in changes else "other"
        changes[category].append((storage.birth_s, storage.size_bytes))
        if storage.death_s is not None:
            changes[category].append((storage.death_s, -storage.size_bytes))
    before_bytes = 0
    for residual in rank.residuals:
        changes[UNEXPLAINED].append((residual.time_s, residual.unexplained_bytes - before_bytes))
        before_bytes = residual.unexplained_bytes
    clipped_s = {min(max(t, step.start_s), step.end_s) for rows in changes.values() for t, _ in rows}
    clock_s = np.array(sorted(clipped_s | {step.start_s, step.end_s}))
    by_category = {name: _step_function(rows, clock_s) for name, rows in changes.items()}
    return MemoryTimeline(
        start_s=step.start_s,
        clock_s=clock_s,
        times_s=clock_s - step.start_s,
        by_category_bytes=by_category,
        total_bytes=np.sum(list(by_category.values()), axis=0, dtype=np.int64),
    )


def _step_function(changes: list[tuple[float, int]], times_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """The running sum of the changes, read at each time; what lies before the first or after the last
    time has happened at the first, or never does."""
    ordered = sorted(changes)
    at_s = np.array([time_s for time_s, _ in ordered])
    running = np.concatenate(([0], np.cumsum([delta for _, delta in ordered], dtype=np.int64)))
    return running[np.searchsorted(at_s, times_s, side="right")].astype(np.int64)
