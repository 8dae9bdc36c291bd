"""Play a sequence of allocations and frees through the simulated allocator."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from memadvisor.cost.allocator_segments import SegmentState
from memadvisor.cost.allocator_settings import AllocatorSettings
from memadvisor.cost.caching_allocator import CachingAllocator


@dataclass(frozen=True, slots=True)
class Change:
    """`size_bytes` above 0 allocates `name`; 0 or less frees it, at once."""

    name: Hashable
    size_bytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a sequence took. The two curves have one value a change, after it; `segments` are those at the end."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    num_releases: int
    segments: tuple[SegmentState, ...]

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved and not allocated when the highest reservation was reached for the first time."""
        if not self.reserved_bytes:
            return 0
        position = self.reserved_bytes.index(self.peak_reserved_bytes)
        return self.reserved_bytes[position] - self.allocated_bytes[position]


def replay(
    changes: Iterable[Change], settings: AllocatorSettings, *, capacity_bytes: int | None = None
) -> Replay:
    """Replay changes from an empty device. A free of what is not there is a mistake of the caller's.

    Raises DeviceFullError where the device has `capacity_bytes` and they do not suffice.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    allocated, reserved = [], []
    for change in changes:
        if change.size_bytes > 0:
            allocator.allocate(change.name, change.size_bytes, stream=change.stream)
        else:
            allocator.free(change.name)
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=tuple(allocated),
        reserved_bytes=tuple(reserved),
        num_releases=allocator.num_releases,
        segments=allocator.segments(),
    )
