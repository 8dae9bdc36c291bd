"""What the CUDA caching allocator reserves beyond what is allocated, which segments hold it, and what pins them.

The allocator takes memory from the device in segments and gives back only whole ones. What is free inside a
segment that is in use serves no request that is larger: fragmentation is reserved less allocated, and each
segment says how much of it is its own and which live storages keep it. The replay plays the traced step's own
allocations through a simulated allocator (memadvisor/cost/caching_allocator.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memadvisor.analyzers.pieces import cut_step
from memadvisor.analyzers.placement import Passes, place_storages
from memadvisor.analyzers.step_storages import step_storages
from memadvisor.cost.allocation_sequence import captured_sequence
from memadvisor.cost.allocator_replay import replay
from memadvisor.cost.allocator_settings import AllocatorSettings, parse_allocator_settings
from memadvisor.errors import UsageError
from memadvisor.run.allocator_records import AllocatorState, DeviceSegment
from memadvisor.run.records import Step, Storage
from memadvisor.run.run import RankRun

_MAX_SEGMENTS = 50
_MAX_PINS = 5
_MAX_REPLAYED_STORAGES = 100_000  # seconds of replay
_ORDER_BY_ADDRESS = ("2.11.", "2.12.")  # of the supported versions of torch; see caching_allocator.py
_WORTH_FRACTION = 0.1
_WORTH_BYTES = 20 * 2**20  # one segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Live storages of one category and module in a segment."""

    category: str
    module: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUse:
    """A segment in use of which something is free; `pinned_by` is what keeps it, largest first."""

    address: int
    pool: str
    stream: int
    is_expandable: bool
    total_bytes: int
    allocated_bytes: int
    free_bytes: int
    largest_free_bytes: int
    pinned_by: tuple[Pin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The allocator's own totals at the end of the traced step, and its peaks until then.

    reserved = allocated + pending (freed, but another stream uses it) + pinned_free + cached. `cached_bytes`
    are free whole segments, which `empty_cache` would give back; `pinned_free_bytes` are free inside segments in
    use. `outside_allocator_bytes`: what NVML counts for this process beyond `reserved_bytes` (CUDA context, NCCL).
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    cached_bytes: int
    pinned_free_bytes: int
    outside_allocator_bytes: int | None
    num_retries: int | None
    num_segments: int
    segments: tuple[SegmentUse, ...]

    @property
    def fragmentation_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """Measured on CUDA, and predicted by the replay; a run on CPU is predicted as for a CUDA device.

    `predicted_allocated_bytes` is the replay's own peak, with CUDA's rounding.
    """

    settings: str
    measured: Measured | None
    predicted_allocated_bytes: int | None
    predicted_reserved_bytes: int | None
    is_for_other_device: bool

    @property
    def error_fraction(self) -> float | None:
        """(predicted - measured) / measured, of the peak reservation."""
        if self.measured is None or self.predicted_reserved_bytes is None:
            return None
        peak = self.measured.peak_reserved_bytes
        return (self.predicted_reserved_bytes - peak) / peak if peak else None

    @property
    def is_worth_showing(self) -> bool:
        """Whether there is CUDA data, or a prediction that much more is reserved than allocated."""
        if self.measured is not None:
            return True
        if self.predicted_reserved_bytes is None or self.predicted_allocated_bytes is None:
            return False
        extra = self.predicted_reserved_bytes - self.predicted_allocated_bytes
        return extra > max(_WORTH_BYTES, _WORTH_FRACTION * self.predicted_allocated_bytes)


def fragmentation(rank: RankRun) -> Fragmentation | None:
    """None where no step was traced."""
    step = rank.traced_step
    if step is None or not rank.storages:
        return None
    state = _state(rank)
    predicted = _replayed(rank, step)
    return Fragmentation(
        settings="" if state is None or state.settings is None else state.settings,
        measured=None if state is None else _measured(rank, step, state),
        predicted_allocated_bytes=predicted[0],
        predicted_reserved_bytes=predicted[1],
        is_for_other_device=not rank.process.device.startswith("cuda"),
    )


def allocator_settings(rank: RankRun) -> AllocatorSettings:
    """Those that were in force; torch's defaults where they were not recorded."""
    state = _state(rank)
    try:
        found = parse_allocator_settings("" if state is None else state.settings or "")
    except UsageError:  # of a later torch
        found = AllocatorSettings()
    return replace(found, orders_by_address=rank.process.torch_version.startswith(_ORDER_BY_ADDRESS))


def outside_allocator_bytes(rank: RankRun) -> int | None:
    """As of `Measured`; None where it was not recorded."""
    state = _state(rank)
    return None if state is None else _outside_bytes(state)


def _outside_bytes(state: AllocatorState) -> int | None:
    return (
        None if state.process_used_bytes is None else max(0, state.process_used_bytes - state.reserved_bytes)
    )


def _state(rank: RankRun) -> AllocatorState | None:
    step = rank.traced_step
    return next((row for row in rank.allocator_states if step is not None and row.step == step.index), None)


def _replayed(rank: RankRun, step: Step) -> tuple[int | None, int | None]:
    """Highest allocation and reservation of the traced step's allocations, played as a training."""
    if len(rank.storages) > _MAX_REPLAYED_STORAGES:
        return None, None
    pieces = cut_step(rank.spans, step)
    placed = place_storages(rank, step, pieces)
    storages = step_storages(rank, step, placed, Passes(pieces), {})
    played = replay(captured_sequence(storages, pieces), allocator_settings(rank))
    return played.peak_allocated_bytes, played.peak_reserved_bytes


def _measured(rank: RankRun, step: Step, state: AllocatorState) -> Measured:
    segments = [row for row in rank.segments if row.step == step.index]
    cached = [row for row in segments if row.active_bytes == 0]
    in_use = [row for row in segments if row.active_bytes > 0]
    return Measured(
        allocated_bytes=state.allocated_bytes,
        active_bytes=state.active_bytes,
        reserved_bytes=state.reserved_bytes,
        peak_allocated_bytes=state.peak_allocated_bytes,
        peak_active_bytes=state.peak_active_bytes,
        peak_reserved_bytes=state.peak_reserved_bytes,
        cached_bytes=sum(row.total_bytes for row in cached),
        pinned_free_bytes=sum(row.total_bytes - row.active_bytes for row in in_use),
        outside_allocator_bytes=_outside_bytes(state),
        num_retries=state.num_retries,
        num_segments=len(segments),
        segments=_uses(rank, step, in_use),
    )


def _uses(rank: RankRun, step: Step, segments: Sequence[DeviceSegment]) -> tuple[SegmentUse, ...]:
    """The segments with most free bytes inside, and what lives in them when the step ends."""
    alive = [
        row
        for row in rank.storages
        if row.address is not None
        and row.device == rank.process.device
        and (row.death_s is None or row.death_s >= step.end_s)
    ]
    partly_free = [row for row in segments if row.total_bytes > row.active_bytes]
    partly_free.sort(key=lambda row: row.active_bytes - row.total_bytes)
    return tuple(
        SegmentUse(
            address=row.address,
            pool=row.pool,
            stream=row.stream,
            is_expandable=row.is_expandable,
            total_bytes=row.total_bytes,
            allocated_bytes=row.allocated_bytes,
            free_bytes=row.total_bytes - row.active_bytes,
            largest_free_bytes=row.largest_free_bytes,
            pinned_by=_pins(row, alive),
        )
        for row in partly_free[:_MAX_SEGMENTS]
    )


def _pins(segment: DeviceSegment, alive: Sequence[Storage]) -> tuple[Pin, ...]:
    sizes: Counter[tuple[str, str]] = Counter()
    end = segment.address + segment.total_bytes
    for row in alive:
        if row.address is not None and segment.address <= row.address < end:
            sizes[row.category, row.owner] += row.size_bytes
    return tuple(
        Pin(category=category, module=module, size_bytes=size_bytes)
        for (category, module), size_bytes in sizes.most_common(_MAX_PINS)
    )
