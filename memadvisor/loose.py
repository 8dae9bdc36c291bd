"""Which gradients stay in autograd's own tensors until ranks of a CPU have reduced them to shards. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memadvisor.precision import Precision, bytes_in
from memadvisor.run.records import Parameter

# Smaller ones would make many messages, and save little memory.
LOOSE_BYTES = 2**16


def is_loose(size_bytes: int) -> bool:
    """Of one parameter's gradient: whether it is sent from where it is, and not collected with others."""
    return size_bytes >= LOOSE_BYTES


class SummedGradient(NamedTuple):
    """Of a parameter of `dtype`, as ranks sum it where it becomes shards. `is_loose`: it may stay where it is made."""

    dtype: str
    size_bytes: int
    is_loose: bool


def summed_gradients(parameters: Iterable[Parameter], precision: Precision) -> list[SummedGradient]:
    """Those of the trainable ones."""
    found = []
    for row in parameters:
        if row.requires_grad:
            size_bytes = bytes_in(row.size_bytes, row.dtype, precision.of_reduction(row.dtype))
            stays = is_loose(size_bytes) and precision.sums_as_made(row.dtype)
            found.append(SummedGradient(row.dtype, size_bytes, stays))
    return found
