"""Ours on the gradients of parameters, and the script's own there (`register_post_accumulate_grad_hook`).

Under DDP such a hook finds this rank's own gradient, with those of earlier micro-batches, before any other rank's is
added; what it writes into it, or puts in its place, is what is reduced. So ours comes after all of the script's,
whenever these were registered: stages 2 and 3 take the gradient away, and a reduction may begin with it.

Refused is what would mean something else. Where each micro-batch is reduced by itself (stages 2 and 3): a hook that
expects the sum of several, or keeps the tensor to look at it when it has become the mean. And one that drops the gradient,
as scripts do that update parameters inside the backward: each rank would go on with its own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from memadvisor.engines.sharding.flat import Slot
from memadvisor.errors import PlanError

if TYPE_CHECKING:
    from memadvisor.engines.sharding.executor import Executor

UPDATE_AFTERWARDS = "update after the backward (with several ranks --update-in-backward saves as much), or run without a plan."


class GradientHooks:
    """Those of one executor, on all of its trainable parameters, from construction to `remove`."""

    def __init__(self, executor: Executor) -> None:
        self._handles: list[tuple[Slot, Any]] = []
        this = weakref.ref(executor)
        for unit in executor.units.values():
            for slot in (slot for flat in unit.trainable for slot in flat.slots):
                parameter: Any = slot.parameter
                hook = _accumulated(this, unit.name, slot)
                self._handles.append((slot, parameter.register_post_accumulate_grad_hook(hook)))

    def come_last(self) -> None:
        """A backward begins: go behind what the script has registered since the last one."""
        for slot, handle in self._handles:
            hooks = handle.hooks_dict_ref()
            slot.has_hooks = hooks is not None and len(hooks) > 1
            if slot.has_hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop()[1].remove()


def _accumulated(executor: weakref.ref[Executor], unit: str, slot: Slot) -> Callable[[torch.Tensor], None]:
    """Hook for a parameter's gradient, on behalf of an executor that it does not keep alive."""
    reference = weakref.ref(slot)

    def accumulated(parameter: torch.Tensor) -> None:
        owner, place = executor(), reference()
        if owner is not None and place is not None:
            owner.reductions.accumulated(owner.units[unit], place)

    return accumulated


def check_hooked(slot: Slot) -> None:
    """The script's hooks have run on a gradient. Raises PlanError where the plan makes something else of what they do."""
    flat, gradient = slot.flat, slot.parameter.grad
    if gradient is None:
        raise PlanError(
            f"A hook on the gradient of {slot.name!r} drops it inside the backward, before the plan takes it over.",
            hint=UPDATE_AFTERWARDS,
        )
    if flat.stage < 2:
        return
    if slot.had_gradient or slot.index in flat.ready:
        raise PlanError(
            f"A hook on the gradient of {slot.name!r} sees the sum of several backwards without a plan, and that of one "
            f"alone under ZeRO stage {flat.stage}.",
            hint="use --zero 1, or drop gradients before each backward (zero_grad).",
        )
    if sys.getrefcount(gradient) > _ALONE:
        raise PlanError(
            f"A hook keeps the gradient of {slot.name!r}, which without a plan becomes the mean of all ranks.",
            hint="use --zero 1, or keep a copy of it (clone).",
        )


def check_outside(optimizer: torch.optim.Optimizer, taken_over: Iterable[object]) -> None:
    """An optimizer steps, some of whose gradients are `taken_over` by the plan. Raises PlanError inside a backward."""
    if any(True for _ in taken_over) and torch._C._current_graph_task_id() >= 0:
        raise PlanError(
            f"A hook on a gradient has {type(optimizer).__name__} step inside the backward, before the plan takes gradients over.",
            hint=UPDATE_AFTERWARDS,
        )


def _num_references(parameter: torch.Tensor) -> int:
    gradient = parameter.grad
    return sys.getrefcount(gradient)


def _alone() -> int:
    """References to a gradient that only its parameter has, as `check_hooked` counts them."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    return _num_references(parameter)


_ALONE = _alone()
