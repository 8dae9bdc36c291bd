"""A simulator of PyTorch's CUDA caching allocator: what a sequence of allocations and frees reserves.

It follows the documented behaviour of the native allocator of torch 2.11 to 2.13 (c10/cuda/CUDACachingAllocator):

- a request is rounded up (allocator_settings.py) and served from the small pool (1 MiB and less) or the large;
- the smallest cached block of the same stream that holds it is taken, and split where enough remains;
- else a segment is asked of the device: 2 MiB for the small pool, 20 MiB below 10 MiB, else the request rounded
  to 2 MiB; or, with expandable segments, pages of 2 or 20 MiB are mapped at the end of one growing segment;
- a freed block joins its free neighbours and is kept. Memory goes back to the device only when the device has
  no more, by garbage collection, or by `empty_cache`.

Assumed: the device gives memory as long as less than `capacity_bytes` is reserved, and no CUDA graph has a pool of its
own. Of free blocks of equal size torch takes that of the oldest segment since 2.13 (BlockComparatorSizeCounterAddress), and
before that of the lowest address, so that it matters where the driver puts segments. An H200's (580.159) gave address space
in pieces of 32 MiB, each new one below those before, and what is left of a piece to segments that fit there: so it is here.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain

from memadvisor.cost.allocator_blocks import Block, ExpandableSegment, Pool
from memadvisor.cost.allocator_segments import SegmentState, segment_states
from memadvisor.cost.allocator_settings import (
    MIB,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    round_up,
)
from memadvisor.errors import MemadvisorError
from memadvisor.units import format_bytes

_FIRST_ADDRESS, _END_OF_ADDRESSES = 1 << 40, 1 << 62
_ADDRESS_PIECE_BYTES = 32 * MIB
_UNKNOWN_CAPACITY_BYTES = 1 << 50


class DeviceFullError(MemadvisorError):
    """An allocation that the device cannot serve even after all cached memory went back to it.

    `requested_bytes` is the request, rounded; the other figures are the allocator's at that moment.
    """

    def __init__(self, allocator: CachingAllocator, requested_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocator.allocated_bytes
        self.reserved_bytes = allocator.reserved_bytes
        unused = format_bytes(self.reserved_bytes - self.allocated_bytes)
        super().__init__(
            f"{format_bytes(requested_bytes)} could not be allocated: {format_bytes(self.allocated_bytes)} are "
            f"allocated, and {unused} more are reserved but in pieces that do not hold it."
        )


class CachingAllocator:
    """The allocator of one device. Allocations are told apart by names of the caller's choice.

    `allocated_bytes` are the blocks in use, `active_bytes` these and the pending ones, `reserved_bytes` what the
    device gave; with peaks of each. `num_releases` counts how often cached memory went back for want of room.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, capacity_bytes: int | None = None
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.active_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_active_bytes = self.peak_reserved_bytes = 0
        self.num_releases = 0
        fraction = self.settings.memory_fraction
        self._allowed_bytes: int | None = None
        if capacity_bytes is not None and fraction is not None and fraction < 1:
            self._allowed_bytes = int(capacity_bytes * fraction)
        self._collects = self._allowed_bytes is not None and self.settings.garbage_collection_threshold > 0
        self._small, self._large = Pool("small"), Pool("large")
        self._live: dict[Hashable, Block] = {}
        self._next_address, self._lowest_address = _FIRST_ADDRESS, _END_OF_ADDRESSES
        self._rests: list[tuple[int, int]] = []  # of pieces of address space: address and bytes

    # ---- what a script does ----------------------------------------------------------------------

    def allocate(self, name: Hashable, size_bytes: int, *, stream: int = 0) -> int:
        """Give `name` a block and return its address. Raises DeviceFullError; nothing is allocated then."""
        if name in self._live or size_bytes <= 0:
            raise AssertionError(f"{name!r} is allocated already, or asks for {size_bytes} bytes")
        size = self.settings.block_bytes(size_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached_block(pool, stream, size) or self._new_block(pool, stream, size)
        if self._should_split(block, size):
            block = self._split(block, size)
        block.allocated, block.name, block.requested_bytes = True, name, size_bytes
        self._live[name] = block
        self.allocated_bytes += block.size_bytes
        self.active_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        return block.address

    def free(self, name: Hashable, *, still_used: bool = False) -> None:
        """Give a block back. `still_used`: another stream works on it (record_stream) until `complete`."""
        block = self._live[name]
        block.allocated = False
        self.allocated_bytes -= block.size_bytes
        block.pending = still_used
        if not still_used:
            self._put_back(name)

    def complete(self, name: Hashable) -> None:
        """The other streams are done with a block that was freed."""
        self._put_back(name)

    def empty_cache(self) -> None:
        """Give the device what is free: whole segments, or whole pages of expandable ones."""
        self._complete_all()
        self._release_free(self._large)
        self._release_free(self._small)

    def segments(self) -> tuple[SegmentState, ...]:
        """All memory that the device gave, in order of address."""
        pools = chain.from_iterable(pool.blocks() for pool in (self._small, self._large))
        return segment_states(chain(pools, self._live.values()))

    # ---- cached blocks -----------------------------------------------------------------------------

    def _cached_block(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Best fit among the stream's free blocks; oversize ones serve only requests of about their size."""
        if self._collects:
            pool.num_searches += 1
        candidates = pool.from_size(stream, size)
        block = next(candidates, None)
        if block is None:
            return None
        if block.segment is not None:
            # A block that can grow counts with what it can grow to.
            for following in candidates:
                if block.segment is None or _expandable_bytes(following) >= _expandable_bytes(block):
                    break
                block = following
        settings = self.settings
        if settings.is_oversize(block.size_bytes) and not settings.is_oversize(size):
            return None
        if settings.is_oversize(size) and block.size_bytes >= size + settings.max_non_split_rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        remaining = block.size_bytes - size
        if block.pool.is_small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return not self.settings.is_oversize(size) and remaining > SMALL_BYTES

    def _split(self, block: Block, size: int) -> Block:
        """The first `size` bytes of a block that is in no pool; the rest goes to its pool."""
        front = Block(block.pool, block.stream, block.address, size, block.segment)
        front.splice(block.prev, block)
        block.address += size
        block.size_bytes -= size
        block.pool.add(block)
        return front

    def _put_back(self, name: Hashable) -> None:
        block = self._live.pop(name)
        block.pending, block.name = False, None
        self.active_bytes -= block.size_bytes
        self._merge(block)
        block.pool.add(block)

    def _merge(self, block: Block) -> None:
        """Join a block that is in no pool with its free neighbours of the same kind."""
        for other in (block.prev, block.next):
            if other is not None and other.is_free and other.mapped == block.mapped:
                block.pool.remove(other)
                other.leave()
                block.address = min(block.address, other.address)
                block.size_bytes += other.size_bytes

    # ---- new memory --------------------------------------------------------------------------------

    def _new_block(self, pool: Pool, stream: int, size: int) -> Block:
        """A block from the device, after giving back what it takes to get it."""
        if self._collects:
            self._collect_garbage()
        block = self._from_device(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._from_device(pool, stream, size)
        if block is None:
            self.num_releases += 1
            self.empty_cache()
            block = self._from_device(pool, stream, size)
        if block is None:
            raise DeviceFullError(self, size)
        return block

    def _from_device(self, pool: Pool, stream: int, size: int) -> Block | None:
        segment_bytes = self.settings.segment_bytes(size)
        if self._allowed_bytes is not None and self.reserved_bytes + segment_bytes > self._allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, stream, size)
        if not self._reserve(segment_bytes):
            return None
        return Block(pool, stream, self._address(segment_bytes), segment_bytes, None)

    def _reserve(self, size_bytes: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + size_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _address(self, size_bytes: int) -> int:
        """Address space that was never used before. Where age decides, older segments lie lower."""
        size_bytes = round_up(size_bytes, SMALL_SEGMENT_BYTES)
        if not self.settings.orders_by_address:
            self._next_address += size_bytes
            return self._next_address - size_bytes
        for place, (address, rest_bytes) in enumerate(self._rests):
            if rest_bytes >= size_bytes:
                self._rests[place] = address + size_bytes, rest_bytes - size_bytes
                return address
        piece_bytes = round_up(size_bytes, _ADDRESS_PIECE_BYTES)
        self._lowest_address -= piece_bytes
        if piece_bytes > size_bytes:
            self._rests.append((self._lowest_address + size_bytes, piece_bytes - size_bytes))
        return self._lowest_address

    def _expand(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Map pages at the lowest place of the stream's segments where `size` bytes can be had in one piece."""
        block = self._expandable_block(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.size_bytes, size)):
            return None
        while block.size_bytes < size:
            following = block.next
            assert following is not None  # _expandable_block found room
            if not self._map(following, min(size - block.size_bytes, following.size_bytes)):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable_block(self, pool: Pool, stream: int, size: int) -> Block:
        for block in pool.unmapped_blocks(stream):
            start = block.prev if block.prev is not None and block.prev.is_free else block
            room = 0
            place: Block | None = start
            while room < size and place is not None and place.is_free:
                room += place.size_bytes
                place = place.next
            if room >= size:
                return start
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else self.settings.large_segment_bytes
        capacity_bytes = self.capacity_bytes or _UNKNOWN_CAPACITY_BYTES
        # An eighth more than there is memory, so that pages can move to the end of the segment.
        space_bytes = round_up(capacity_bytes + capacity_bytes // 8, page_bytes)
        space_bytes = max(space_bytes, round_up(size, page_bytes))
        address = self._address(space_bytes)
        block = Block(pool, stream, address, space_bytes, ExpandableSegment(address, page_bytes, space_bytes))
        block.mapped = False
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the first `size` bytes of an unmapped block with pages, all or none; it ends up in the pool."""
        assert block.segment is not None
        page_bytes = block.segment.page_bytes
        mapped_bytes = round_up(size, page_bytes)
        if not self._reserve(mapped_bytes):
            return False
        block.pool.remove(block)
        block.mapped = True
        if mapped_bytes < block.size_bytes:
            rest = Block(
                block.pool,
                block.stream,
                block.address + mapped_bytes,
                block.size_bytes - mapped_bytes,
                block.segment,
            )
            rest.mapped = False
            rest.splice(block, block.next)
            block.size_bytes = mapped_bytes
            block.pool.add(rest)
        self._merge(block)
        block.pool.add(block)
        return True

    # ---- giving memory back ------------------------------------------------------------------------

    def _complete_all(self) -> None:
        for name in [name for name, block in self._live.items() if block.pending]:
            self._put_back(name)

    def _release(self, block: Block) -> None:
        """Give a segment that is one free block back to the device."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _release_free(self, pool: Pool) -> None:
        free = pool.free_blocks()
        for block in free:
            if block.segment is None and not block.is_split:
                self._release(block)
        for block in free:
            if block.segment is not None:
                self._unmap(block)

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block of an expandable segment."""
        assert block.segment is not None
        address, size_bytes = block.segment.pages_inside(block.address, block.size_bytes)
        if size_bytes == 0:
            return
        block.pool.remove(block)
        before_bytes = address - block.address
        after_bytes = block.size_bytes - before_bytes - size_bytes
        if before_bytes:
            before = Block(block.pool, block.stream, block.address, before_bytes, block.segment)
            before.splice(block.prev, block)
            block.pool.add(before)
        if after_bytes:
            after = Block(block.pool, block.stream, address + size_bytes, after_bytes, block.segment)
            after.splice(block, block.next)
            block.pool.add(after)
        block.address, block.size_bytes, block.mapped = address, size_bytes, False
        self._merge(block)
        self.reserved_bytes -= size_bytes
        if block.is_split:
            block.pool.add(block)

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Where splitting is limited: release one oversize block that is enough, or the largest until it is."""
        limit_bytes = self.settings.max_split_size_bytes
        if limit_bytes is None:
            return False
        wanted_bytes = max(size, limit_bytes)
        block = next(pool.from_size(stream, wanted_bytes), None)
        if block is not None and block.segment is None:
            self._release(block)
            return True
        released_bytes = 0
        for block in pool.largest_first(stream):
            if released_bytes >= wanted_bytes or block.size_bytes < limit_bytes:
                break
            if block.segment is None and block.size_bytes < wanted_bytes:
                released_bytes += block.size_bytes
                self._release(block)
        return released_bytes >= wanted_bytes

    def _collect_garbage(self) -> None:
        """Above the threshold, release the large free segments that were not used for longest."""
        assert self._allowed_bytes is not None
        threshold_bytes = int(self.settings.garbage_collection_threshold * self._allowed_bytes)
        target_bytes = self.reserved_bytes - threshold_bytes
        aging = [block for block in self._large.free_blocks() if not block.is_split]
        reclaimed_bytes = 0
        while aging and reclaimed_bytes < target_bytes:
            ages = {block: self._large.num_searches - block.age_base for block in aging}
            # Older than the average; the average sinks while old ones go.
            total, count = sum(ages.values()), len(ages)
            limit = total / count
            old = [block for block in aging if ages[block] >= limit and block.segment is None]
            if not old:
                return
            for block in old:
                reclaimed_bytes += block.size_bytes
                self._release(block)
            aging = [block for block in aging if block not in set(old)]


def _expandable_bytes(block: Block) -> int:
    """What a free block and the unmapped space after it hold together."""
    following = block.next
    return block.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)
