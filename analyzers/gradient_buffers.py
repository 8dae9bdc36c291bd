"""The flat buffers that collect units' gradients, and which of them a gradient itself becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memadvisor.precision import Precision, bytes_in
from memadvisor.run.records import Parameter


@dataclass(frozen=True, slots=True)
class Buffers:
    """The flat buffers that collect units' gradients.

    adopting: units whose only gradient becomes the buffer, because it is of its dtype.
    """

    size_bytes: Mapping[str, int]
    adopting: Collection[str]


def buffers_of(parameters: Mapping[str, Sequence[Parameter]], precision: Precision) -> Buffers:
    sizes: dict[str, int] = {}
    adopting = set()
    for unit, rows in parameters.items():
        trainable = [row for row in rows if row.requires_grad]
        sizes[unit] = sum(
            bytes_in(row.size_bytes, row.dtype, precision.of_reduction(row.dtype)) for row in trainable
        )
        if len(trainable) == 1:
            dtype = trainable[0].dtype
            if precision.of_parameter(dtype) == precision.of_reduction(dtype):
                adopting.add(unit)
    return Buffers(sizes, adopting)
