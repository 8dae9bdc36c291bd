"""Updates on gradients that DistributedDataParallel was told not to average, as local SGD has them."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from memadvisor.run.living import living


class LocalUpdates:
    """Looks for what is averaged once, as a script may have an optimizer for each parameter."""

    def __init__(self) -> None:
        self._replicated = living(DistributedDataParallel)

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a DistributedDataParallel of what the optimizer updates was called last inside `no_sync`, or as if it was: it
        remembers that for its next call, as parameters need no broadcast then. So it does of a call without gradients."""
        updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return any(
            not ddp.require_forward_param_sync
            and any(id(each) in updated for each in ddp.module.parameters())
            for ddp in self._replicated
        )
