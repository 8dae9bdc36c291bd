"""Blocks of the simulated caching allocator, and the pools that keep the free ones in order.

Free blocks of a stream are ordered by size, then address; unmapped ones by address. Lists with binary
search serve both: pools hold at most a few thousand blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Literal


class Block:
    """A range of one segment. `prev` and `next` are its neighbours in the segment; None at the ends.

    `name` is whose it is while `allocated`; afterwards a block may still be `pending` (used by another stream). An
    expandable segment's blocks may be unmapped: address space without memory.
    """

    __slots__ = (
        "address",
        "age_base",
        "allocated",
        "mapped",
        "name",
        "next",
        "pending",
        "pool",
        "prev",
        "requested_bytes",
        "segment",
        "size_bytes",
        "stream",
    )

    def __init__(
        self, pool: Pool, stream: int, address: int, size_bytes: int, segment: ExpandableSegment | None
    ) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size_bytes = size_bytes
        self.segment = segment
        self.requested_bytes = 0
        self.name: Hashable = None
        self.allocated = False
        self.pending = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.age_base = 0

    @property
    def is_free(self) -> bool:
        return not self.allocated and not self.pending

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Stand between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def leave(self) -> None:
        """Take this block out of its segment's chain."""
        if self.prev is not None:
            self.prev.next = self.next
        if self.next is not None:
            self.next.prev = self.prev


@dataclass(frozen=True, slots=True)
class ExpandableSegment:
    """Address space that is mapped page by page."""

    address: int
    page_bytes: int
    size_bytes: int  # of the address space

    def pages_inside(self, address: int, size_bytes: int) -> tuple[int, int]:
        """First address and bytes of the whole pages inside a range."""
        first = -(-(address - self.address) // self.page_bytes)
        last = (address + size_bytes - self.address) // self.page_bytes
        return self.address + first * self.page_bytes, max(0, last - first) * self.page_bytes


class Pool:
    """The small or the large pool: free and unmapped blocks of every stream."""

    def __init__(self, kind: Literal["small", "large"]) -> None:
        self.kind = kind
        self.is_small = kind == "small"
        self.num_searches = 0
        self._free: dict[int, list[tuple[int, int, Block]]] = {}
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}

    def add(self, block: Block) -> None:
        if block.mapped:
            block.age_base = self.num_searches
            insort(self._free.setdefault(block.stream, []), (block.size_bytes, block.address, block))
        else:
            insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            free = self._free[block.stream]
            del free[bisect_left(free, (block.size_bytes, block.address))]
        else:
            unmapped = self._unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]

    def from_size(self, stream: int, size_bytes: int) -> Iterator[Block]:
        """Free blocks of a stream with at least so many bytes, smallest first."""
        free = self._free.get(stream, [])
        for position in range(bisect_left(free, (size_bytes,)), len(free)):
            yield free[position][2]

    def largest_first(self, stream: int) -> list[Block]:
        return [block for _, _, block in reversed(self._free.get(stream, []))]

    def free_blocks(self) -> list[Block]:
        """Of every stream, in order of stream, size and address."""
        return [block for stream in sorted(self._free) for _, _, block in self._free[stream]]

    def blocks(self) -> Iterator[Block]:
        """All free and unmapped ones."""
        for free in self._free.values():
            yield from (block for _, _, block in free)
        for unmapped in self._unmapped.values():
            yield from (block for _, block in unmapped)

    def unmapped_blocks(self, stream: int) -> list[Block]:
        return [block for _, block in self._unmapped.get(stream, [])]
