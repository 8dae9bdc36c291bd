"""Gathers and reductions to shards as messages between pairs of ranks (memadvisor/executors.py names the algorithms).

`exchange(sent, to, received, source)` begins to send to one rank and to receive from another. Sums keep one order in
every algorithm: this rank's share, then that of the rank before it, the one before that, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Transfer(Protocol):
    def wait(self) -> object: ...


Exchange = Callable[[torch.Tensor, int, torch.Tensor, int], Sequence[Transfer]]


def gather_pairwise(
    exchange: Exchange, slices: Sequence[torch.Tensor], rank: int, own: torch.Tensor | None = None
) -> None:
    """Fill the slices of the others from what they have of their own.

    own: this rank's slice where it lies elsewhere. It is sent from there, and copied while the messages are under way.
    """
    num_ranks = len(slices)
    works: list[Transfer] = []
    for distance in range(1, num_ranks):
        source = (rank - distance) % num_ranks
        sent = slices[rank] if own is None else own
        works += exchange(sent, (rank + distance) % num_ranks, slices[source], source)
    if own is not None:
        slices[rank].copy_(own)
    _wait(works)


def gather_by_doubling(exchange: Exchange, full: torch.Tensor, rank: int, num_ranks: int) -> None:
    """The same for a power of two of ranks: after each round a rank has the slices of twice as many, side by side."""
    num_elements, have = full.numel() // num_ranks, 1
    while have < num_ranks:
        partner, length = rank ^ have, have * num_elements
        own, other = ((place // have) * length for place in (rank, partner))
        _wait(exchange(full[own : own + length], partner, full[other : other + length], partner))
        have *= 2


def reduce_pairwise(
    exchange: Exchange, slices: Sequence[torch.Tensor], rank: int, staging: torch.Tensor
) -> torch.Tensor:
    """The sum of all ranks' slices of this rank, in `staging`; the own slice is used up."""
    num_ranks = len(slices)
    for distance in range(1, num_ranks):
        to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        _wait(exchange(slices[to], to, staging, source))
        if distance < num_ranks - 1:
            slices[rank].add_(staging)
    return staging.add_(slices[rank])  # of storage of its own, which may stay when the full gradient goes


def reduce_together(
    exchange: Exchange,
    slices: Sequence[torch.Tensor],
    rank: int,
    staging: torch.Tensor,
    others: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The same with room in `others` for what all ranks send but the last whose share is added."""
    num_ranks = len(slices)
    works: list[Transfer] = []
    for distance, room in enumerate((*others, staging), 1):
        to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        works += exchange(slices[to], to, room, source)
    _wait(works)
    for room in others:
        slices[rank].add_(room)
    return staging.add_(slices[rank])


def _wait(works: Sequence[Transfer]) -> None:
    for work in works:
        work.wait()
