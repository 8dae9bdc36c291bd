"""Means of whole gradients as products of two thin matrices, with error feedback (stages 0 and 1).

PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727, algorithm 1). Each rank adds to the gradient of a
matrix what it has left over from before (its *residual*), M = G + E, and sends P = M Q, with the Q of the step
before; all have the mean of the P and make its columns orthonormal. Then each sends Q = M^T P; all have the mean of
the Q, and P Q^T is what they take for the mean of the gradients: one step of a power iteration a training step. What
that product lacks of M is the new residual. So nothing is lost: all means that ever came out, and the mean of the
residuals, add up to the sum of all true means (but for rounding of float32).

A parameter of two dimensions or more is taken as a matrix of its first dimension by all others, in its storage's
order. Those whose two thin matrices would be more than half as large, and vectors, are sent as they are, with P.
After a gradient with an infinity or a NaN, which comes out as one on every rank, what is left over of it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from memadvisor.compression import thin_matrix
from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.lanes.lanes import Ticket
from memadvisor.engines.sharding.flat import Flat


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A part of a flat, and where its thin matrices are in the messages. `rows`: of P, `columns`: of Q."""

    start: int
    rows: int
    columns: int
    first: int
    second: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of one flat, from its first gradient on: residuals of all its elements, and the Q of the step before."""

    matrices: tuple[_Matrix, ...]
    plain: tuple[tuple[int, int], ...]  # parts of the flat that are sent as they are
    num_first: int  # elements of the first message
    residual: torch.Tensor
    thin: torch.Tensor

    def plain_in(
        self, values: torch.Tensor, message: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of `values` that are sent as they are, each with its place at the message's end."""
        place = self.num_first - sum(end - start for start, end in self.plain)
        for start, end in self.plain:
            yield values[start:end], message[place : place + end - start]
            place += end - start


class LowRank:
    """Of one model; what it keeps goes with the executor."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._kept: dict[int, _Kept] = {}

    def begin_mean(self, flat: Flat, grad: torch.Tensor) -> Ticket:
        """Begin to replace `grad`, float32, by its mean over the ranks, as far as it is sent in this step."""
        kept = self._kept.get(flat.index)
        if kept is None:
            kept = self._kept[flat.index] = self._begin(flat, grad)
        n, device = self._wire.num_ranks, grad.device
        first = self._wire.stage(n * kept.num_first, torch.float32, device)
        second = self._wire.stage(n * kept.thin.numel(), torch.float32, device)
        work = partial(self._mean, flat.unit, flat.index, grad, kept, first, second)
        return self._wire.lane(device).submit(work, writes=(grad, kept.residual, kept.thin, first, second))

    def left_over(self) -> Iterator[torch.Tensor]:
        """What is kept from one step to the next."""
        for kept in self._kept.values():
            yield from (kept.residual, kept.thin)

    def _begin(self, flat: Flat, grad: torch.Tensor) -> _Kept:
        matrices: list[_Matrix] = []
        plain: list[tuple[int, int]] = []
        first = second = 0
        for slot in flat.slots:
            sides = thin_matrix(slot.shape, self._rank)
            if sides is None:
                plain.append((slot.start, slot.end))
                continue
            matrices.append(_Matrix(slot.start, *sides, first, second))
            first += sides[0] * self._rank
            second += sides[1] * self._rank
        thin = self._wire.stage(second, torch.float32, grad.device)
        # Numbers of its own, alike on all ranks: the script's random streams stay where they are.
        numbers = torch.Generator().manual_seed(flat.index)
        thin.copy_(torch.randn(second, generator=numbers, device="cpu"))
        residual = self._wire.stage(flat.num_elements, torch.float32, grad.device).zero_()
        num_first = first + sum(end - start for start, end in plain)
        return _Kept(tuple(matrices), tuple(plain), num_first, residual, thin)

    def _mean(
        self,
        unit: str,
        number: int,
        grad: torch.Tensor,
        kept: _Kept,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> None:
        """Work of a lane."""
        left = kept.residual.add_(grad)
        own = first.chunk(self._wire.num_ranks)[self._wire.rank]
        for matrix in kept.matrices:
            torch.mm(matrix.of(left), self._q(matrix, kept.thin), out=self._p(matrix, own))
        for part, there in kept.plain_in(left, own):
            there.copy_(part)
        means = self._mean_of(first, unit, number)
        for part, there in kept.plain_in(grad, means):
            part.copy_(there)
        own = second.chunk(self._wire.num_ranks)[self._wire.rank]
        for matrix in kept.matrices:
            p = self._p(matrix, means)
            p.copy_(torch.linalg.qr(p).Q)  # orthonormal columns, whatever p is
            torch.mm(matrix.of(left).T, p, out=self._q(matrix, own))
        thin = self._mean_of(second, unit, number)
        for matrix in kept.matrices:
            mean = matrix.of(grad)
            torch.mm(self._p(matrix, means), self._q(matrix, thin).T, out=mean)
            matrix.of(left).sub_(mean)
        for start, end in kept.plain:
            left[start:end].zero_()
        left.nan_to_num_(0.0, 0.0, 0.0)
        kept.thin.copy_(thin.nan_to_num_(0.0, 0.0, 0.0))

    def _mean_of(self, messages: torch.Tensor, unit: str, number: int) -> torch.Tensor:
        """Have the messages of all ranks; their mean, added up in one order everywhere, in place of the first."""
        parts = messages.chunk(self._wire.num_ranks)
        if messages.numel():
            self._wire.exchange_shards(messages, parts[self._wire.rank], unit, number)
        for part in parts[1:]:
            parts[0].add_(part)
        return parts[0].div_(self._wire.num_ranks)

    def _p(self, matrix: _Matrix, message: torch.Tensor) -> torch.Tensor:
        return message[matrix.first : matrix.first + matrix.rows * self._rank].view(matrix.rows, self._rank)

    def _q(self, matrix: _Matrix, message: torch.Tensor) -> torch.Tensor:
        end = matrix.second + matrix.columns * self._rank
        return message[matrix.second : end].view(matrix.columns, self._rank)
