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


Parts = Sequence[torch.Tensor]  # of one rank's, which are sent and received one after another
Exchange = Callable[[Parts, int, Parts, int], Sequence[Transfer]]


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
        works += exchange([sent], (rank + distance) % num_ranks, [slices[source]], source)
    if own is not None:
        slices[rank].copy_(own)
    _wait(works)


def gather_by_doubling(exchange: Exchange, full: torch.Tensor, rank: int, num_ranks: int) -> None:
    """The same for a power of two of ranks: after each round a rank has the slices of twice as many, side by side."""
    num_elements, have = full.numel() // num_ranks, 1
    while have < num_ranks:
        partner, length = rank ^ have, have * num_elements
        own, other = ((place // have) * length for place in (rank, partner))
        _wait(exchange([full[own : own + length]], partner, [full[other : other + length]], partner))
        have *= 2


def reduce_pairwise(
    exchange: Exchange, pieces: Sequence[Parts], rank: int, staging: torch.Tensor
) -> torch.Tensor:
    """The sum of all ranks' pieces for this rank, in `staging`; the own ones are used up."""
    num_ranks, own = len(pieces), pieces[rank]
    places = split_as(staging, own)
    for distance in range(1, num_ranks):
        to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        _wait(exchange(pieces[to], to, places, source))
        if distance < num_ranks - 1:
            _add(own, places)
    _add(places, own)  # of storage of its own, which may stay when the full gradient goes
    return staging


def reduce_together(
    exchange: Exchange,
    pieces: Sequence[Parts],
    rank: int,
    staging: torch.Tensor,
    others: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The same with room in `others` for what all ranks send but the last whose share is added."""
    num_ranks, own = len(pieces), pieces[rank]
    rooms = [split_as(room, own) for room in (*others, staging)]
    works: list[Transfer] = []
    for distance, room in enumerate(rooms, 1):
        to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        works += exchange(pieces[to], to, room, source)
    _wait(works)
    for room in rooms[:-1]:
        _add(own, room)
    _add(rooms[-1], own)
    return staging


def split_as(whole: torch.Tensor, parts: Parts) -> list[torch.Tensor]:
    """Places in a 1-D tensor for as many elements as each part has, one after another from its start."""
    sizes = [part.numel() for part in parts]
    return list(torch.split(whole[: sum(sizes)], sizes))


def _add(totals: Parts, others: Parts) -> None:
    for total, other in zip(totals, others, strict=True):
        total.add_(other)


def _wait(works: Sequence[Transfer]) -> None:
    for work in works:
        work.wait()
