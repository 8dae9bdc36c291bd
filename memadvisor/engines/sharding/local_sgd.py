"""Local SGD on a live model: which steps reduce nothing, and when parameters become their mean over the ranks.

All ranks average after the same backward (memadvisor/local_sgd.py says after which), when the optimizer has stepped.
Updates are no measure of that, since a rank may leave one out: a GradScaler does so by itself on a rank whose own
gradients overflow, and that rank takes part where its `step` returns. A script may do so too; such a rank takes part
at its next call through DDP, before anything that DDP sends there, and the others wait for it where they have stepped.

Of several optimizers the last one to step is waited for, of those that have been seen to step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memadvisor.engines.script.undo import Undo
from memadvisor.errors import PlanError
from memadvisor.local_sgd import LocalSgd
from memadvisor.schedule import ActionKind, Point

if TYPE_CHECKING:
    from memadvisor.engines.sharding.executor import Executor
    from memadvisor.engines.sharding.flat import UnitState


class LocalSteps:
    """Of one model; without local SGD every step reduces, and there is never anything to average."""

    def __init__(self, executor: Executor) -> None:
        self._executor: Executor = weakref.proxy(executor)
        self._local_sgd = executor.schedule.local_sgd
        self._num_steps = 0
        self._expects_step = False  # whether the backward to come is one after which DDP would reduce
        self._is_due = False
        self._have_parted = False  # whether ranks have stepped by themselves since parameters were alike
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def expect(self, through_ddp: bool, is_step: bool) -> bool:
        """A forward with gradients begins. Returns whether the backwards that follow it reduce."""
        if through_ddp:
            self.average_if_due()
        self._expects_step = is_step
        is_local = self._local_sgd is not None and self._local_sgd.is_local(self._num_steps)
        return is_step and not is_local

    def backward_ends(self) -> None:
        if self._local_sgd is None or not self._expects_step:
            return
        self._have_parted |= self._local_sgd.is_local(self._num_steps)
        self._num_steps += 1
        if self._local_sgd.is_averaged_after(self._num_steps):
            self._is_due = True
            self._waiting = weakref.WeakSet(self._optimizers)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or left out a step."""
        if optimizer not in self._optimizers:
            ours = {id(slot.parameter) for slot in self._executor.slots}
            if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                return
            self._optimizers.add(optimizer)
        self._waiting.discard(optimizer)
        if not self._waiting:
            self.average_if_due()

    def average_if_due(self) -> None:
        if self._is_due:
            self._average()

    def end(self) -> None:
        """The engine is taken off: DDP takes ranks to be alike."""
        if self._have_parted:
            self._average()

    def _average(self) -> None:
        self._is_due = self._have_parted = False
        self._waiting.clear()
        with torch.no_grad():
            for action in self._executor.schedule.at(Point.AFTER_OPTIMIZER):
                if action.kind is ActionKind.AVERAGE:
                    self._average_unit(self._executor.units[action.unit])

    def _average_unit(self, unit: UnitState) -> None:
        wire = self._executor.wire
        self._executor.unit = unit.name
        under_way = []
        for flat in unit.trainable:
            staging = wire.stage(flat.num_elements, flat.dtype, flat.device)
            for slot in flat.slots:
                slot.view(staging).copy_(slot.parameter)
            under_way.append((flat, staging, wire.begin_mean(staging, unit.name)))
        for flat, staging, transfer in under_way:
            transfer.wait()
            for slot in flat.slots:
                slot.parameter.copy_(slot.view(staging))


def patch(local_sgd: LocalSgd | None, executors: Iterable[Executor], undo: Undo) -> None:
    """Have the executors told of steps, of steps left out, and of calls through DDP. Without local SGD nothing is."""
    if local_sgd is None:
        return

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        for executor in sorted(executors, key=lambda executor: executor.number):  # alike on all ranks
            executor.reductions.local_steps.optimizer_steps(optimizer)

    undo.add(register_optimizer_step_pre_hook(_refusal()).remove)
    undo.add(register_optimizer_step_post_hook(lambda optimizer, args, kwargs: stepped(optimizer)).remove)
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
