"""What convolutions in bfloat16 take for themselves on this machine's CPU, by running each once."""

from __future__ import annotations

import math
from collections.abc import Set

import torch

from memadvisor.autocast import NarrowConvolution, NarrowWork
from memadvisor.calibrate.product_workspaces import alone, bytes_beside

_FLOPS = 2e11  # that all may take together: some seconds


def convolution_workspaces(
    convolutions: Set[NarrowConvolution], num_threads: int | None = None
) -> dict[NarrowWork, int]:
    """Bytes of each, with as many threads. Smaller ones come first; those for which no time is left are not there."""
    known: dict[NarrowWork, int] = {}
    left_flops = _FLOPS
    with alone(num_threads) as may_measure:
        for convolution in sorted(convolutions, key=_flops) if may_measure else ():
            left_flops -= _flops(convolution)
            if left_flops > 0:
                known[convolution] = _workspace_bytes(convolution)
    return known


def _flops(convolution: NarrowConvolution) -> int:
    laid_on = convolution.images if convolution.is_transposed else convolution.result
    times = 1 if convolution.gives is None else sum(convolution.gives)
    return 2 * times * convolution.images[0] * math.prod(convolution.filters) * math.prod(laid_on[2:])


def _workspace_bytes(convolution: NarrowConvolution) -> int:
    images, filters, result = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cpu")
        for shape in (convolution.images, convolution.filters, convolution.result)
    )
    sides = (convolution.strides, convolution.paddings, convolution.dilations)
    laid = (*map(list, sides), convolution.is_transposed, [0] * len(sides[0]), convolution.num_groups)
    if convolution.gives is None:
        return bytes_beside(lambda: [torch.ops.aten.convolution(images, filters, None, *laid)])
    mask = [*convolution.gives, False]
    backward = torch.ops.aten.convolution_backward
    return bytes_beside(lambda: [*backward(result, images, filters, None, *laid, mask)])
