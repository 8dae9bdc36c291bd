"""The flat buffers that collect units' gradients, and which of them a gradient itself becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memadvisor.loose import is_loose
from memadvisor.precision import Precision, bytes_in
from memadvisor.run.records import Parameter


@dataclass(frozen=True, slots=True)
class Buffers:
    """The flat buffers that collect units' gradients.

    adopting: units whose only gradient becomes the buffer, because it is of its dtype. small_bytes: of units whose large
    gradients may stay where they are made (memadvisor/loose.py), what collects the others.
    """

    size_bytes: Mapping[str, int]
    adopting: Collection[str]
    small_bytes: Mapping[str, int]


def buffers_of(parameters: Mapping[str, Sequence[Parameter]], precision: Precision) -> Buffers:
    sizes: dict[str, int] = {}
    adopting = set()
    small: dict[str, int] = {}
    for unit, rows in parameters.items():
        trainable = [row for row in rows if row.requires_grad]
        sizes[unit] = sum(
            bytes_in(row.size_bytes, row.dtype, precision.of_reduction(row.dtype)) for row in trainable
        )
        if len(trainable) == 1 and precision.sums_as_made(trainable[0].dtype):
            adopting.add(unit)
        gradients = [
            (bytes_in(row.size_bytes, row.dtype, precision.of_reduction(row.dtype)), row.dtype)
            for row in trainable
        ]
        collected = [
            size for size, dtype in gradients if not (is_loose(size) and precision.sums_as_made(dtype))
        ]
        if len(collected) < len(gradients):
            small[unit] = sum(collected)
    return Buffers(sizes, adopting, small)
