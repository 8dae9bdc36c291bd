"""Means over the ranks of several small tensors in one message (memadvisor/merged_reductions.py says which)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.lanes.lanes import Ticket


class JointMean:
    """Ticket of tensors of one dtype; they hold the mean once it has been waited for."""

    def __init__(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor, sum_: Ticket) -> None:
        self._tensors, self._buffer, self._sum = list(tensors), buffer, sum_

    def wait(self) -> Any:
        self._sum.wait()
        with torch.no_grad():
            sizes = [tensor.numel() for tensor in self._tensors]
            torch._foreach_copy_(self._tensors, list(torch.split(self._buffer, sizes)))
        del self._buffer

    def join(self) -> None:
        self._sum.join()


def begin_joint_means(wire: Wire, tensors: Sequence[torch.Tensor], units: str) -> list[JointMean]:
    """Begin to replace 1-D tensors by their means over the ranks: a message for each dtype, from a buffer beside them.

    units: what an error names.
    """
    begun = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        buffer = wire.stage(sum(tensor.numel() for tensor in alike), dtype, alike[0].device)
        torch.cat(alike, out=buffer)
        begun.append(JointMean(alike, buffer, wire.begin_mean(buffer, units)))
    return begun
