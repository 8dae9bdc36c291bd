"""Dealing a script's batches to ranks: rank r of n gets batches r, r + n, ... of the one order that rank 0 draws.

What a script with one process reads from a `torch.utils.data.DataLoader` is dealt as accelerate does by default:
each rank takes whole batches, so that n times as many samples go into a step; the last round is filled up from
the beginning, so that every rank has as many batches as the others.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from memadvisor.errors import PlanError

# A batch is a list of indices; a loader that does not batch (batch_size=None) draws bare ones.
Batch = list[int] | int
_ROUNDS_AT_ONCE = 64
_BARE = -1


def rounds_of(
    batches: Iterable[Any], num_ranks: int, *, batch_size: int | None, drop_last: bool
) -> Iterator[list[Any]]:
    """Rounds of `num_ranks` batches, one a rank.

    A last round that is short of batches, or whose last batch is short of samples, is dropped with `drop_last`,
    else filled with the first samples; where batches have no common size (`batch_size` None), with the first
    batches.
    """
    first: list[Any] = []
    pending: list[Any] = []
    for batch in batches:
        if len(first) < num_ranks:
            first.append(batch)
        pending.append(batch)
        if len(pending) == num_ranks and (batch_size is None or len(batch) == batch_size):
            yield pending
            pending = []
    if not pending or drop_last:
        return
    if batch_size is None:
        yield list(itertools.islice(itertools.chain(pending, itertools.cycle(first)), num_ranks))
        return
    again = itertools.cycle(itertools.chain.from_iterable(first))
    samples = list(itertools.islice(itertools.chain(*pending, again), num_ranks * batch_size))
    yield [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]


def num_rounds(num_batches: int, num_ranks: int, *, drop_last: bool) -> int:
    """How many batches each rank gets of `num_batches`, all of which are full where `drop_last`."""
    return num_batches // num_ranks if drop_last else -(-num_batches // num_ranks)


def deal(rounds: Iterator[list[Any]], rank: int) -> Iterator[Batch]:
    """This rank's batches of rank 0's rounds, which travel by broadcast, many at a time.

    Every rank draws rounds of its own too, so that random numbers are drawn as they are without us.
    """
    is_over = False
    while not is_over:
        drawn = list(itertools.islice(rounds, _ROUNDS_AT_ONCE))
        lengths, indices = _numbers_of(drawn)
        header = torch.tensor([len(drawn), len(lengths), len(indices)], device="cpu")
        dist.broadcast(header, 0)
        num_drawn, *counts = header.tolist()
        if rank:
            lengths, indices = (torch.zeros(count, dtype=torch.int64, device="cpu") for count in counts)
        for numbers in (lengths, indices):
            if len(numbers):
                dist.broadcast(numbers, 0)
        batches = _batches_of(lengths.tolist(), indices.tolist())
        yield from batches[rank :: dist.get_world_size()]
        is_over = num_drawn < _ROUNDS_AT_ONCE


def _numbers_of(rounds: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths: list[int] = []
    indices: list[int] = []
    try:
        for batch in itertools.chain.from_iterable(rounds):
            if hasattr(batch, "__len__"):
                lengths.append(len(batch))
                indices += [operator.index(index) for index in batch]
            else:
                lengths.append(_BARE)
                indices.append(operator.index(batch))
    except TypeError:
        raise PlanError(
            "The sampler of the script's DataLoader draws something else than whole numbers, which cannot be dealt "
            "to ranks.",
            hint="wrap the model in DistributedDataParallel and shard the data in the script.",
        ) from None
    return _on_host(lengths), _on_host(indices)


def _batches_of(lengths: list[int], indices: list[int]) -> list[Batch]:
    batches: list[Batch] = []
    start = 0
    for length in lengths:
        if length == _BARE:
            batches.append(indices[start])
            start += 1
        else:
            batches.append(indices[start : start + length])
            start += length
    return batches


def _on_host(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
