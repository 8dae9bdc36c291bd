"""Play a sequence of allocations and frees through the simulated allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from memadvisor.cost.allocator_segments import SegmentState
from memadvisor.cost.allocator_settings import AllocatorSettings
from memadvisor.cost.caching_allocator import CachingAllocator


@dataclass(frozen=True, slots=True)
class Change:
    """`size_bytes` above 0 allocates `name`; 0 or less frees it, at once. `category`: of what is allocated; `place`: words
    for where that is in the step, whose number `step` is. `is_aside`: something as large is freed right after, and accounts of
    steps have no moment with both."""

    name: Hashable
    size_bytes: int
    stream: int = 0
    category: str = "other"
    place: str = ""
    step: int = 0
    is_aside: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPeak:
    """The most that was allocated, first where it was several times, in blocks as the allocator gives them."""

    allocated_bytes: int
    by_category_bytes: dict[str, int]  # parts of it
    place: str


def last_peak(changes: Sequence[Change], played: Replay) -> ReplayedPeak:
    """Of the last step of these changes, whose replay is given. In the first ones the optimizer has no state yet, and steps
    that are measured come after them."""
    of_step = (at for at, change in enumerate(changes) if change.step == changes[-1].step)
    at = max((at for at in of_step if not changes[at].is_aside), key=played.allocated_bytes.__getitem__)
    peak_bytes = played.allocated_bytes[at]
    blocks: dict[Hashable, tuple[str, int]] = {}
    before_bytes = 0
    for change, after_bytes in zip(changes[: at + 1], played.allocated_bytes, strict=False):
        if change.size_bytes > 0:
            blocks[change.name] = change.category, after_bytes - before_bytes
        else:
            del blocks[change.name]
        before_bytes = after_bytes
    found: Counter[str] = Counter()
    for category, block_bytes in blocks.values():
        found[category] += block_bytes
    return ReplayedPeak(allocated_bytes=peak_bytes, by_category_bytes=dict(found), place=changes[at].place)


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
