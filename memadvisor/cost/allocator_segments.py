"""What the simulated allocator holds at one moment: segments and their blocks, as torch's snapshot shows them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from memadvisor.cost.allocator_blocks import Block


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block of a segment: `state` is allocated, pending (freed, but another stream uses it) or free."""

    address: int
    size_bytes: int
    state: str
    name: Hashable
    requested_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentState:
    """Memory that the device gave in one piece; of an expandable segment, a stretch that is mapped."""

    address: int
    pool: str
    stream: int
    is_expandable: bool
    blocks: tuple[BlockState, ...]

    @property
    def total_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)

    @property
    def allocated_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks if block.state == "allocated")

    @property
    def largest_free_bytes(self) -> int:
        return max((block.size_bytes for block in self.blocks if block.state == "free"), default=0)


def segment_states(blocks: Iterable[Block]) -> tuple[SegmentState, ...]:
    """The segments that are made of these blocks (all of the allocator's), in order of address."""
    found = []
    for head in [block for block in blocks if block.prev is None]:
        stretch: list[BlockState] = []
        block: Block | None = head
        while block is not None:
            if block.mapped:
                stretch.append(_state(block))
            if stretch and (block.next is None or not block.mapped):
                is_expandable = block.segment is not None
                found.append(
                    SegmentState(
                        stretch[0].address, head.pool.kind, head.stream, is_expandable, tuple(stretch)
                    )
                )
                stretch = []
            block = block.next
    return tuple(sorted(found, key=lambda segment: segment.address))


def _state(block: Block) -> BlockState:
    state = "allocated" if block.allocated else "pending" if block.pending else "free"
    requested_bytes = block.requested_bytes if block.allocated else 0
    return BlockState(block.address, block.size_bytes, state, block.name, requested_bytes)
