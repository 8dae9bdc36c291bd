"""Rows of the head's product: which of them a tensor made of it has, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


def on_host(start: int, stop: int) -> torch.Tensor:
    """Numbers of rows, whatever device is the script's default."""
    return torch.arange(start, stop, device="cpu")


@dataclass(frozen=True, slots=True)
class Rows:
    """Those from `start` to `stop`, or of these the ones of `index` (int64, on the host) alone, in its order."""

    start: int
    stop: int
    index: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.index is None else len(self.index)

    def numbers(self) -> torch.Tensor:
        return on_host(self.start, self.stop) if self.index is None else self.index

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """These rows of a tensor: a view of it where they follow one another."""
        if self.index is None:
            return matrix[self.start : self.stop]
        return matrix.index_select(0, self.index.to(matrix.device))

    def put(self, matrix: torch.Tensor, values: torch.Tensor) -> None:
        """Set these rows of a matrix."""
        if self.index is None:
            matrix[self.start : self.stop] = values
        else:
            matrix.index_copy_(0, self.index.to(matrix.device), values)


def rows_of(numbers: torch.Tensor) -> Rows:
    """Rows by their numbers, as a range where they are one."""
    if not len(numbers):
        return Rows(0, 0)
    first, last = int(numbers.min()), int(numbers.max()) + 1
    if last - first == len(numbers) and torch.equal(numbers, on_host(first, last)):
        return Rows(first, last)
    return Rows(first, last, numbers)


class RowMap:
    """The row of the product that is at each position of a tensor, all of whose dimensions but one are positions.

    `numbers` None: position by position the product's own. No row is at two positions; -1 is a row of zeros, as they are
    in gradients of what was only read in part.
    """

    __slots__ = ("_positions", "has_gaps", "num_rows", "numbers")

    def __init__(self, num_rows: int, numbers: torch.Tensor | None = None) -> None:
        self.num_rows = num_rows
        self.numbers = numbers
        self.has_gaps = numbers is not None and bool((numbers < 0).any())
        self._positions: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.num_rows if self.numbers is None else len(self.numbers)

    def is_like(self, other: RowMap) -> bool:
        if self is other:
            return True
        if self.num_rows != other.num_rows or (self.numbers is None) is not (other.numbers is None):
            return False
        return self.numbers is None or (
            other.numbers is not None and torch.equal(self.numbers, other.numbers)
        )

    def all_numbers(self) -> torch.Tensor:
        return on_host(0, self.num_rows) if self.numbers is None else self.numbers

    def chunks(self, num_rows: int) -> Iterator[tuple[Rows, Rows]]:
        """Positions, and the rows of the product that are there, so many of the product's at a time. Whoever asks, and for
        whatever part, the product is done for the same rows at once, and so is the same in every bit."""
        for start in range(0, self.num_rows, num_rows):
            rows = Rows(start, min(start + num_rows, self.num_rows))
            where = self.positions(rows)
            if isinstance(where, Rows):
                yield where, rows
                continue
            there = (where >= 0).nonzero().flatten()
            if len(there):
                yield rows_of(where[there]), Rows(rows.start, rows.stop, rows.numbers()[there])

    def positions(self, rows: Rows) -> torch.Tensor | Rows:
        """Where rows are: as Rows where all are there; else with -1 for those that are not."""
        if self.numbers is None:
            return rows
        if self._positions is None:
            filled = (self.numbers >= 0).nonzero().flatten()
            self._positions = torch.full((self.num_rows,), -1, device="cpu")
            self._positions[self.numbers[filled]] = filled
        found = rows.of(self._positions)
        return found if bool((found < 0).any()) else rows_of(found)


def joined(maps: Sequence[RowMap], numbers: torch.Tensor) -> RowMap | None:
    """A map of these numbers, where they are of the same product's rows and none is there twice."""
    filled = numbers[numbers >= 0]
    if len({row_map.num_rows for row_map in maps}) > 1 or len(torch.unique(filled)) < len(filled):
        return None
    if len(numbers) == maps[0].num_rows and torch.equal(numbers, on_host(0, len(numbers))):
        return RowMap(len(numbers))
    return RowMap(maps[0].num_rows, numbers)
