"""Our collectives as FSDP2 takes them, through its public `Comm` interface.

FSDP2 waits where it needs what a gather brings, so one of these runs on a lane meanwhile, which the backend's own do
not on a CPU. A reduction is over when the call returns. Who records the training is told of outputs and inputs (`label`): what
a lane's thread does with them is not seen.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from memadvisor.engines.activations.recompute import Label
from memadvisor.engines.collectives.native import all_gather, reduce_scatter
from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.lanes.lanes import Ticket


class _Arriving(dist.Work):
    """A gather under way; None: it is over."""

    def __init__(self, ticket: Ticket | None) -> None:
        super().__init__()
        self._ticket = ticket

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.wait()
        return True


class _Allocating:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class Gather(_Allocating, AllGather):
    """Gathers of one group, among the ranks that share it, or those that have parts of it after the forward. `is_ahead`: some are
    not waited for at once; `number` tells it from other groups."""

    wires: dict[dist.ProcessGroup, Wire]
    name: str
    number: int
    is_ahead: bool
    label: Label

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.label(output_tensor, "communication", self.name)
        wire = self.wires[group]
        if wire.algorithm("all_gather", output_tensor) == "native":
            all_gather(output_tensor, input_tensor, group=group)
            return _Arriving(None)
        if not self.is_ahead:
            wire.gather(output_tensor, input_tensor, self.name, self.number)
            return _Arriving(None)
        return _Arriving(wire.begin_gather(output_tensor, input_tensor, self.name, self.number))


@dataclass(eq=False)
class Scatter(_Allocating, ReduceScatter):
    """Reductions of one group to shards."""

    wire: Wire
    name: str
    number: int
    label: Label

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.label(input_tensor, "communication", self.name)
        is_known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if not is_known or self.wire.algorithm("reduce_scatter", input_tensor) == "native":
            reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return None
        self.wire.reduce_scatter(input_tensor, self.name, self.number, into=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self.wire.num_ranks)
        return None
