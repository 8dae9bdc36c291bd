"""What was in memory when: the traced step's bytes by category, as exact step functions of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Bytes alive on the rank's own device over the traced step, by category.

    `times_s` ascend, in seconds since the step began; entry i of each array holds from `times_s[i]` to
    `times_s[i + 1]`, and the last one at the step's end. `by_category_bytes` has all CATEGORIES and
    `unexplained` (what the allocator reports beyond the storages; may be negative); they sum to `total_bytes`.
    """

    start_s: float  # the step's start on the process's clock, as in the records
    times_s: NDArray[np.float64]
    by_category_bytes: dict[str, NDArray[np.int64]]
    total_bytes: NDArray[np.int64]


def memory_timeline(rank: RankRun) -> MemoryTimeline | None:
    """Sum storages from birth to death, and add the residuals. None when no step was traced."""
    raise NotImplementedError
