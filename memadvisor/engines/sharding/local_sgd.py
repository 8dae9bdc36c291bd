"""When parameters become their mean under local SGD: telling of steps, of steps left out, and of calls through DDP.

Updates are no measure of when to average, since a rank may leave one out: a GradScaler does so by itself on a rank whose
own gradients overflow, and that rank takes part where its `step` returns. A script may do so too; such a rank takes part
at its next call through DDP, before anything that DDP sends there, and the others wait for it where they have stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.executor import Executor
from memadvisor.errors import PlanError
from memadvisor.local_sgd import LocalSgd
from memadvisor.never_compiled import called_by_python


def patch(local_sgd: LocalSgd | None, executors: Iterable[Executor], undo: Undo) -> None:
    """Have the executors told of steps, of steps left out, and of calls through DDP. Without local SGD nothing is."""
    if local_sgd is None:
        return

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        for executor in sorted(executors, key=lambda executor: executor.number):  # alike on all ranks
            executor.reductions.local_steps.optimizer_steps(optimizer)

    undo.add(register_optimizer_step_pre_hook(called_by_python(_refusal())).remove)
    undo.add(
        register_optimizer_step_post_hook(
            called_by_python(lambda optimizer, args, kwargs: stepped(optimizer))
        ).remove
    )
    scaler = torch.amp.GradScaler
    undo.replace(scaler, "step", _telling(scaler.step, stepped))
    ddp: Any = DistributedDataParallel
    undo.replace(ddp, "_pre_forward", _averaging(ddp._pre_forward))


def _refusal() -> Callable[..., None]:
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,  # of all of that package, which few plans need
    )

    # An update takes as many passes as this rank's gradients ask for; or other ranks' parameters by this rank's gradients.
    refused = (torch.optim.LBFGS, ZeroRedundancyOptimizer)

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, refused):
            raise PlanError(
                f"{type(optimizer).__name__} needs gradients that are alike on all ranks, and local SGD leaves them apart.",
                hint="use another optimizer, or run without --local-sgd.",
            )

    return refuse


def _telling(
    original: Callable[..., Any], stepped: Callable[[torch.optim.Optimizer], None]
) -> Callable[..., Any]:
    def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, optimizer, *args, **kwargs)
        stepped(optimizer)  # which its own hook has not said if this rank's gradients overflowed
        return result

    return step


def _averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    def pre_forward(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
        executor = None if torch.compiler.is_compiling() else getattr(wrapper.reducer, "executor", None)
        # A rank may evaluate through DDP by itself, if DDP sends nothing then.
        if executor is not None and (torch.is_grad_enabled() or wrapper.will_sync_module_buffers()):
            executor.reductions.local_steps.average_if_due()
        return original(wrapper, *inputs, **kwargs)

    return pre_forward
