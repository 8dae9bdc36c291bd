"""The buckets of DistributedDataParallel: memory that C++ holds for good, and that no tensor of Python's need share.

What goes through a collective is seen there. A step without one (`no_sync`, local SGD), or with a hook that sends
something else, leaves them to their owner's word: DDP tells their sizes (`census.bucket_sizes`). Pure Python, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

_NAMED = frozenset(("gradient", "communication"))


class Held(Protocol):
    """A block of memory, and what those who know it say that it is."""

    size_bytes: int
    categories: set[str]
    shape: str


def name_buckets(there: Iterable[Held], sizes: Sequence[int], unexplained_bytes: int) -> list[int]:
    """Name what was `there` before the step, is as large as a bucket, and is nobody else's.

    Returns the sizes of buckets that are not among it, if there are as many unexplained bytes; else none.
    """
    wanted = Counter(sizes)
    mine = [block for block in there if block.size_bytes in wanted and _may_be_bucket(block)]
    # One that gradients are views of, or that a collective sent, has its name, and comes first; one that a hook in
    # Python was given is a tensor that the census found, and comes last, for it may be anybody's.
    for block in sorted(mine, key=lambda block: (not block.categories & _NAMED, "other" in block.categories)):
        if wanted[block.size_bytes]:
            wanted[block.size_bytes] -= 1
            if not block.categories & _NAMED:
                block.categories = {"communication"}
    untouched = list(wanted.elements())
    return untouched if sum(untouched) <= unexplained_bytes else []


def _may_be_bucket(block: Held) -> bool:
    is_flat = "," not in block.shape
    return block.categories <= _NAMED or (is_flat and block.categories <= {"other", "activation"})


def buckets_among(unnamed: Mapping[int, int | None], sizes: Sequence[int]) -> list[int]:
    """Addresses of blocks that nobody has named, for which an allocator was asked for as many bytes as a bucket has."""
    wanted, found = Counter(sizes), []
    for address, requested_bytes in unnamed.items():
        if requested_bytes is not None and wanted[requested_bytes]:
            wanted[requested_bytes] -= 1
            found.append(address)
    return found
