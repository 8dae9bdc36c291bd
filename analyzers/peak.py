"""What filled the memory at its peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.cost.places import PHASE_PLACES, place_in
from memadvisor.run.records import CATEGORIES, Span, Storage
from memadvisor.run.run import RankRun

NUM_LARGEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """Bytes of one category at the peak that were born while `module` was the innermost one running, or, of parameters
    gathered ahead, that are of the unit `module`."""

    module: str
    unit: str
    category: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBreakdown:
    """The fullest moment of the traced step, and whose bytes they were.

    `allocated_bytes` is the allocator's own peak (where it kept none: the largest sum of storages, and
    `is_allocators` is False). `by_category_bytes` has all CATEGORIES, and with `unexplained_bytes`
    sums exactly to `allocated_bytes`. `unexplained_bytes` holds what no storage explains, and the
    difference between the allocator's peak and the timeline's own (`timeline_bytes`). `by_root_bytes`: of the rows of
    `by_module` that name no module, what the root model's own forward made, by category.
    """

    time_s: float  # since the traced step began
    step: int
    phase: str  # one of PHASES, or "evaluation"
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
    by_root_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def unexplained_fraction(self) -> float | None:
        """How much of the peak is unexplained, or explained twice: a fraction of 1 without a sign."""
        return abs(self.unexplained_bytes) / self.allocated_bytes if self.allocated_bytes else None


def peak_breakdown(rank: RankRun, timeline: MemoryTimeline | None) -> PeakBreakdown | None:
    """Break the traced step's peak down. None when no step was traced."""
    step = rank.traced_step
    if step is None or timeline is None:
        return None
    index = int(np.argmax(timeline.total_bytes))
    clock_s = float(timeline.clock_s[index])
    timeline_bytes = int(timeline.total_bytes[index])
    by_category = {name: int(timeline.by_category_bytes[name][index]) for name in CATEGORIES}
    is_allocators = step.peak_allocated_bytes is not None
    allocated_bytes = timeline_bytes if step.peak_allocated_bytes is None else step.peak_allocated_bytes
    alive = alive_storages(rank, clock_s)
    phase, unit, micro_batch = _where_it_peaked(rank, clock_s)
    return PeakBreakdown(
        time_s=float(timeline.times_s[index]),
        step=step.index,
        phase=phase,
        unit=unit,
        micro_batch=micro_batch,
        position=_position(rank, clock_s, phase, unit),
        allocated_bytes=allocated_bytes,
        is_allocators=is_allocators,
        reserved_bytes=step.peak_reserved_bytes,
        timeline_bytes=timeline_bytes,
        unexplained_bytes=allocated_bytes - sum(by_category.values()),
        by_category_bytes=by_category,
        by_module=_by_module(alive),
        largest=tuple(sorted(alive, key=lambda s: -s.size_bytes)[:NUM_LARGEST]),
        by_root_bytes=_by_root(alive),
    )


def place_at(rank: RankRun, clock_s: float) -> str:
    """Where the traced step is at this moment of the process's clock, in words."""
    phase, unit, _ = where(rank, clock_s)
    return _position(rank, clock_s, phase, unit)


def _position(rank: RankRun, clock_s: float, phase: str, unit: str) -> str:
    """In words, as plans have them: the root's own forward and backward are named as such."""
    around = _around(rank, clock_s)
    is_roots = bool(around) and _innermost(around).kind == f"unit_{phase}" and not unit
    return f"{phase} of the model itself" if is_roots else position_in_words(phase, unit)


def _where_it_peaked(rank: RankRun, clock_s: float) -> tuple[str, str, int | None]:
    """Where the storage was born that made the peak; where the spans say if none was born then.

    On an accelerator the spans are on its own timeline, behind the host's, on which storages are born; else they know
    better: a gradient is of its parameter's unit, whichever backward made it.
    """
    phase, unit, micro_batch = where(rank, clock_s)
    if rank.process.device == "cpu":
        return phase, unit, micro_batch
    born = [s for s in rank.storages if s.birth_s == clock_s and s.device == rank.process.device]
    if phase == "evaluation" or not born or born[-1].phase == "baseline":
        return phase, unit, micro_batch
    place = born[-1]
    in_micro_batch = place.phase in ("forward", "recompute", "backward")
    return place.phase, place.unit, place.micro_batch if in_micro_batch else None


def alive_storages(rank: RankRun, time_s: float) -> list[Storage]:
    """Storages alive on the rank's own device at this moment of the process's clock."""
    return [
        storage
        for storage in rank.storages
        if storage.device == rank.process.device
        and storage.birth_s <= time_s
        and (storage.death_s is None or time_s < storage.death_s)
    ]


def where(rank: RankRun, time_s: float) -> tuple[str, str, int | None]:
    """Phase, unit and micro-batch that the traced step is in at this moment of the process's clock.

    The unit is that of the innermost span around the moment; "" where there is none.
    """
    around = _around(rank, time_s)
    if not around:
        return "outside", "", None
    span = _innermost(around)
    if any(other.kind == "evaluation" for other in around):
        return "evaluation", span.unit, None
    phase = span.kind.removeprefix("unit_")
    return phase, span.unit, None if phase == "optimizer" else span.micro_batch


def _around(rank: RankRun, time_s: float) -> list[Span]:
    step = rank.traced_step
    return [
        span
        for span in rank.spans
        if step is not None and span.step == step.index and span.start_s <= time_s < span.end_s
    ]


def _innermost(around: Sequence[Span]) -> Span:
    """Of spans that begin together, the one of a unit lies inside the one of the phase."""
    return max(around, key=lambda s: (s.start_s, s.kind.startswith("unit_"), -s.end_s))


def position_in_words(phase: str, unit: str) -> str:
    """`backward of blocks.3`, `optimizer step`, and what plans call the rest (cost/places.py): `forward outside any unit`."""
    words = {**PHASE_PLACES, "recompute": "recomputation"}.get(phase, phase)
    if unit:
        return f"{words} of {unit}"
    return place_in(phase, None) if phase in ("forward", "backward") else words


def _by_root(alive: Sequence[Storage]) -> dict[str, int]:
    """The phase is forward inside a module's alone, and the root's has no name."""
    sizes: dict[str, int] = defaultdict(int)
    for storage in alive:
        if not storage.owner and not storage.unit and storage.phase == "forward":
            sizes[storage.category if storage.category in CATEGORIES else "other"] += storage.size_bytes
    return dict(sizes)


def _by_module(alive: list[Storage]) -> tuple[ModuleBytes, ...]:
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    for storage in alive:
        category = storage.category if storage.category in CATEGORIES else "other"
        sizes[storage.owner, storage.unit, category] += storage.size_bytes
    rows = [ModuleBytes(module=m, unit=u, category=c, size_bytes=n) for (m, u, c), n in sizes.items()]
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.module, row.category)))
