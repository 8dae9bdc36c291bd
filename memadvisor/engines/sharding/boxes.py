"""A run of a tensor's elements as boxes: what a rank's shard holds of a parameter, as sharded checkpoints name it.

A shard begins and ends anywhere in a parameter, also in the middle of a row; torch.distributed.checkpoint knows
rectangular parts alone. A run of a tensor of d dimensions is at most 2 d - 1 of them, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """`first`: how many elements of the run lie before it."""

    offsets: Sizes
    sizes: Sizes
    first: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)


def boxes_of_run(first: int, end: int, sizes: Sequence[int]) -> list[Box]:
    """Elements [first, end) of a tensor of these sizes in row-major order, as boxes in that order."""
    boxes: list[Box] = []
    for offsets, box_sizes in _boxes(first, end, tuple(sizes)):
        boxes.append(Box(offsets, box_sizes, sum(box.num_elements for box in boxes)))
    return boxes


def _boxes(first: int, end: int, sizes: Sizes) -> list[tuple[Sizes, Sizes]]:
    if first >= end:
        return []
    if not sizes:
        return [((), ())]
    inner = math.prod(sizes[1:])
    row, last_row = first // inner, (end - 1) // inner
    if row == last_row and end - first < inner:
        return _in_row(row, first, end, sizes)
    first_whole, end_whole = -(-first // inner), end // inner
    found = _in_row(row, first, first_whole * inner, sizes)
    if end_whole > first_whole:
        zeros = (0,) * (len(sizes) - 1)
        found.append(((first_whole, *zeros), (end_whole - first_whole, *sizes[1:])))
    return found + _in_row(end_whole, end_whole * inner, end, sizes)


def _in_row(row: int, first: int, end: int, sizes: Sizes) -> list[tuple[Sizes, Sizes]]:
    start = row * math.prod(sizes[1:])
    return [
        ((row, *offsets), (1, *box_sizes))
        for offsets, box_sizes in _boxes(first - start, end - start, sizes[1:])
    ]


def storage_order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions of a dense tensor from the one that changes slowest in memory to the fastest."""
    return sorted(range(len(sizes)), key=lambda dim: (-strides[dim], -sizes[dim], dim))
