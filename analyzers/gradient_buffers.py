"""The flat buffers that collect units' gradients, and which of them a gradient itself becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memadvisor.loose import summed_gradients
from memadvisor.precision import Precision
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
        gradients = summed_gradients(rows, precision)
        sizes[unit] = sum(each.size_bytes for each in gradients)
        if len(gradients) == 1 and precision.sums_as_made(gradients[0].dtype):
            adopting.add(unit)
        if any(each.is_loose for each in gradients):
            small[unit] = sum(each.size_bytes for each in gradients if not each.is_loose)
    return Buffers(sizes, adopting, small)
