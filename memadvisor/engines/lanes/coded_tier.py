"""A tier whose writes code and whose reads decode: what it takes lies in the memory of the device itself.

Both are done by the thread that computes, in what the device computes with, so they are over when they have been
asked for. A block is made of the tensors that were written to its parts; all of it written again, or read, is these one
by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from memadvisor.coded_states import coded_bytes
from memadvisor.engines.lanes.dynamic_code import DynamicCode
from memadvisor.engines.lanes.lanes import Ticket


@dataclass(slots=True)
class _Piece:
    """A tensor of a block: its codes, and what it is when it is decoded."""

    coded: torch.Tensor
    num_elements: int
    dtype: torch.dtype

    def view(self, packed: torch.Tensor, start: int) -> torch.Tensor:
        """Its place in the bytes of all of the block."""
        return packed[start : start + self.num_elements * self.dtype.itemsize].view(self.dtype)


@dataclass(slots=True, eq=False)
class CodedBlock:
    """Tensors by where they begin in the block, in bytes."""

    pieces: dict[int, _Piece] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    block: CodedBlock
    start: int


class CodedTier:
    """See the top of this file; its `read` and `write` are as those of the other tiers (tiers.py)."""

    def __init__(self, device: torch.device) -> None:
        self.code = DynamicCode(device)

    def allocate(self, size_bytes: int) -> CodedBlock:
        return CodedBlock()

    def free(self, block: CodedBlock) -> None:
        block.pieces.clear()

    def part(self, block: CodedBlock, start: int, size_bytes: int) -> _Part:
        return _Part(block, start)

    def write(self, block: CodedBlock | _Part, source: torch.Tensor) -> Ticket:
        if isinstance(block, CodedBlock):
            for start, piece in block.pieces.items():
                self.code.encode(piece.view(source, start), piece.coded)
            return _Done()
        coded = torch.empty(coded_bytes(source.numel()), dtype=torch.uint8, device=source.device)
        self.code.encode(source, coded)
        block.block.pieces[block.start] = _Piece(coded, source.numel(), source.dtype)
        return _Done()

    def read(
        self, block: CodedBlock | _Part, target: torch.Tensor, *, after: Sequence[Ticket] = ()
    ) -> Ticket:
        for ticket in after:
            ticket.wait()
        if isinstance(block, CodedBlock):
            for start, piece in block.pieces.items():
                self.code.decode(piece.coded, piece.view(target, start))
        else:
            self.code.decode(block.block.pieces[block.start].coded, target)
        return _Done()


class _Done:
    """What has been asked for is over."""

    def wait(self) -> None:
        return None

    def join(self) -> None:
        return None


def codes_in(block: object) -> Iterator[torch.Tensor]:
    """What a block of a tier holds of the device's memory."""
    if isinstance(block, CodedBlock):
        yield from (piece.coded for piece in block.pieces.values())


def tables_of(tier: object) -> tuple[torch.Tensor, ...]:
    """What a tier holds of the device's memory whether anything is in it or not."""
    return tier.code.tables if isinstance(tier, CodedTier) else ()
