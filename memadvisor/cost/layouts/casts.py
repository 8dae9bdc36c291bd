"""What it takes to cast operands of products of fewer than 16 bits, by who casts them and what has a scale.

An operand is read in 16 bits and written for its products: as it is for one, transposed for the other (Micikevicius et al. 2022,
arXiv:2209.05433; Transformer Engine). Where its scale is that of its largest element of now, and not of steps before, it is
read once more to find that.
"""

from __future__ import annotations

from collections.abc import Sequence

from memadvisor.cost.layouts.kernels import Device, stream_seconds
from memadvisor.software_traits import Software

_READ_BYTES = 2.0
# Where each row has a scale, an operand is cast for each product anew: along its rows in one pass, along its columns with a
# pass for their maxima before. Products of the backward, which accumulate in fp32, are scaled in 16 bits afterwards
# (torchao/float8/float8_linear.py and float8_ops.py; github.com/pytorch/ao/pull/1325).
_ROWS_BYTES, _COLUMNS_BYTES, _SCALED_BYTES = 3.0, 5.0, 4.0


def cast_seconds(
    device: Device, products: Sequence[tuple[float, float, float, float]], software: Software
) -> tuple[float, float]:
    """Of what comes into the products forward, and of the gradients of their results backward; `products`: rows, columns, depth
    and how many of each. Matrices are cast once a step, but where each microbatch gathers them in 16 bits and casts them
    itself."""
    if not device.is_narrow:
        return 0.0, 0.0
    inputs = sum(rows * depth * count for rows, _, depth, count in products)
    results = sum(rows * columns * count for rows, columns, _, count in products)
    weights = sum(columns * depth * count for _, columns, depth, count in products)
    forward_bytes, backward_bytes = _cast_bytes(software, inputs, results, weights)
    return stream_seconds(device, forward_bytes), stream_seconds(device, backward_bytes)


def _cast_bytes(software: Software, inputs: float, results: float, weights: float) -> tuple[float, float]:
    written = software.narrow_bytes
    looked = _READ_BYTES if software.scales in ("current", "blocks-of-tensor") else 0.0
    one_way = _READ_BYTES + written
    if software.lora is not None:  # frozen matrices have no gradients, for which operands would be transposed
        return (looked + one_way) * inputs, (looked + one_way) * results
    if software.scales == "rows":
        operands = inputs + weights
        backward = (_COLUMNS_BYTES + _SCALED_BYTES) * operands + (_ROWS_BYTES + _COLUMNS_BYTES) * results
        return _ROWS_BYTES * operands, backward
    both_ways = _READ_BYTES + (2 if software.transposes else 1) * written
    if not software.casts_again:
        return (looked + both_ways) * inputs, (looked + both_ways) * results
    # The backward has inputs in 16 bits, and casts them with the scale that the forward found.
    operands = inputs + (0.0 if software.gathers_narrow else weights)
    of_results = both_ways if software.scales == "current" else 2 * one_way
    return (looked + one_way) * operands, one_way * operands + (looked + of_results) * results
