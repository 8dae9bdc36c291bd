"""Whether ranks on this machine compute where their other threads run too."""

from __future__ import annotations

import os


def share_cores(num_ranks: int) -> bool:
    """Where each rank has less than two cores, those of its threads that do not compute take one that does."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_cores < 2 * num_ranks
