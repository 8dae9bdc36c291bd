"""Communication hooks of DistributedDataParallel that do otherwise from some iteration on, which the traced step is before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memadvisor.run.documents import LATER_HOOK
from memadvisor.run.living import living
from memadvisor.units import format_bytes

# torch/distributed/algorithms/ddp_comm_hooks: how many iterations are all-reduced as without the hook, by its state's class.
_BEGINNINGS = {"PowerSGDState": "start_powerSGD_iter", "PostLocalSGDState": "start_localSGD_iter"}


def what_begins_later(step: int) -> str | None:
    """What to say of the traced step, which has just ended; None where nothing is left to come.

    A state counts the backward passes that the hook has reduced.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for ddp, state, begins_at in _waiting():
        kept = ""
        if getattr(state, "use_error_feedback", False):
            size_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
            kept = f", an error of up to the size of all gradients ({format_bytes(size_bytes)}) among it"
        return (
            f"{LATER_HOOK}{type(state).__name__}) begins at its iteration "
            f"{begins_at}, and the traced step is before that: what it allocates and sends from then on{kept}, is in no figure. "
            f"--trace-step {step + begins_at - state.iter + 2} traces one of those."
        )
    return None


def _waiting() -> Iterator[tuple[DistributedDataParallel, Any, int]]:
    """Wrappers, states of their hooks that have not begun, and at which iteration they will."""
    for ddp in living(DistributedDataParallel):
        for _, state in getattr(ddp, "_comm_hooks", ()):
            names = (_BEGINNINGS.get(kind.__name__) for kind in type(state).__mro__)
            begins_at = next((getattr(state, name, None) for name in names if name is not None), None)
            if isinstance(begins_at, int) and 0 < state.iter <= begins_at:
                yield ddp, state, begins_at
