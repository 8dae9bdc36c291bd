"""What filled the memory at its peak."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.analyzers.timeline import MemoryTimeline

from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """Bytes of one category at the peak that were born while `module` was the innermost one running."""

    module: str
    unit: str
    category: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBreakdown:
    """The fullest moment of the traced step, and whose bytes they were.

    `allocated_bytes` is the allocator's own peak (where it kept none: the largest sum of storages, and
    `is_allocators` is False). `by_category_bytes` has all eight CATEGORIES, and with `unexplained_bytes`
    sums exactly to `allocated_bytes`. `unexplained_bytes` holds what no storage explains, and the
    difference between the allocator's peak and the timeline's own (`timeline_bytes`).
    """

    time_s: float  # since the traced step began
    step: int
    phase: str  # one of PHASES
    unit: str
    micro_batch: int | None  # None outside forward and backward
    position: str  # "backward of blocks.3"
    allocated_bytes: int
    is_allocators: bool
    reserved_bytes: int | None
    timeline_bytes: int
    unexplained_bytes: int
    by_category_bytes: dict[str, int]
    by_module: tuple[ModuleBytes, ...]  # largest first; sums to the categories
    largest: tuple[Storage, ...]  # the 20 largest alive at the peak


def peak_breakdown(rank: RankRun, timeline: MemoryTimeline | None) -> PeakBreakdown | None:
    """Break the traced step's peak down. None when no step was traced."""
    raise NotImplementedError
