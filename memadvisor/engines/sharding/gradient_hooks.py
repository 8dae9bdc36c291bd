"""Ours on the gradients of parameters, and the script's own there (`register_post_accumulate_grad_hook`).

Under DDP such a hook finds this rank's own gradient, with those of earlier micro-batches, before any other rank's is
added; what it writes into it, or puts in its place, is what is reduced. So ours comes after all of the script's,
whenever these were registered: stages 2 and 3 take the gradient away, and a reduction may begin with it.

A hook may keep `p.grad`, which is the mean when the backward is over: with stages 0 and 1 that very tensor becomes a view of
the buffer that is reduced (`reductions.py`).

Refused is what would mean something else. Where each micro-batch is reduced by itself (stages 2 and 3): a hook that
expects the sum of several, or keeps the tensor to look at it when it has become the mean. With any stage, one that keeps
another tensor of its memory (`p.grad.detach()`), where that is not the buffer's: it would go on showing this rank's own
gradient. For this a hook of ours counts who holds that memory before all of the script's. And one that drops the gradient, as
scripts do that update parameters inside the backward: each rank would go on with its own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from memadvisor.engines.sharding.flat import Slot, UnitState
from memadvisor.engines.sharding.holders import num_holders
from memadvisor.errors import PlanError

UPDATE_AFTERWARDS = "update after the backward (with several ranks --update-in-backward saves as much), or run without a plan."


class Accumulated(Protocol):
    """Who is told of each gradient that autograd has added, after the script's own hooks on it."""

    def accumulated(self, unit: str, slot: Slot) -> None: ...


class GradientHooks:
    """Those of one model, on all of its trainable parameters, from construction to `remove`."""

    def __init__(self, units: Iterable[UnitState], told: Accumulated) -> None:
        self._handles: list[tuple[Slot, Any]] = []
        self._first: dict[int, Any] = {}  # handles of hooks before the script's, by the slot's index
        this = weakref.ref(told)
        for unit in units:
            for slot in (slot for flat in unit.trainable for slot in flat.slots):
                hook = _accumulated(this, unit.name, slot)
                self._handles.append((slot, _register(slot, hook)))

    def come_last(self) -> None:
        """A backward begins: go around what the script has registered since the last one."""
        for slot, handle in self._handles:
            hooks = handle.hooks_dict_ref() or {}
            first = self._first.get(slot.index)
            ours = {handle.id} if first is None else {handle.id, first.id}
            slot.has_hooks = len(hooks) > len(ours)
            if not slot.has_hooks:
                continue
            if first is None:
                first = self._first[slot.index] = _register(slot, _count_holders(slot))
            theirs = [each for each in hooks if each not in (handle.id, first.id)]
            order = [first.id, *theirs, handle.id]
            for each in order if list(hooks) != order else ():
                hooks[each] = hooks.pop(each)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop()[1].remove()
        while self._first:
            self._first.popitem()[1].remove()


def _register(slot: Slot, hook: Callable[[torch.Tensor], None]) -> Any:
    parameter: Any = slot.parameter
    return parameter.register_post_accumulate_grad_hook(hook)


def _count_holders(slot: Slot) -> Callable[[torch.Tensor], None]:
    reference = weakref.ref(slot)

    def count_holders(parameter: torch.Tensor) -> None:
        place, gradient = reference(), parameter.grad
        if place is not None and gradient is not None:
            place.before_hooks = gradient.untyped_storage()._cdata, num_holders(gradient)

    return count_holders


def _accumulated(told: weakref.ref[Accumulated], unit: str, slot: Slot) -> Callable[[torch.Tensor], None]:
    """Hook for a parameter's gradient, on behalf of one whom it does not keep alive."""
    reference = weakref.ref(slot)

    def accumulated(parameter: torch.Tensor) -> None:
        owner, place = told(), reference()
        if owner is not None and place is not None:
            owner.accumulated(unit, place)

    return accumulated


def check_hooked(slot: Slot, *, is_buffer: bool) -> None:
    """The script's hooks have run on a gradient. Raises PlanError where the plan makes something else of what they do.

    is_buffer: the gradient's memory is, or becomes, that of the buffer which is reduced.
    """
    flat, gradient = slot.flat, slot.parameter.grad
    if gradient is None:
        raise PlanError(
            f"A hook on the gradient of {slot.name!r} drops it inside the backward, before the plan takes it over.",
            hint=UPDATE_AFTERWARDS,
        )
    if _is_kept_otherwise(slot, gradient) and (flat.stage >= 2 or not is_buffer):
        raise PlanError(
            f"A hook keeps a view of the gradient of {slot.name!r}, whose memory without a plan comes to hold the mean of all "
            "ranks.",
            hint="keep a copy of it (clone).",
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


def _is_kept_otherwise(slot: Slot, gradient: torch.Tensor) -> bool:
    """Whether the script's hooks have left another tensor of the gradient's memory, or have put in its place what has one."""
    storage, num_before = slot.before_hooks
    is_same = gradient.untyped_storage()._cdata == storage
    return slot.has_hooks and num_holders(gradient) > (num_before if is_same else _ONE_TENSOR)


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
    parameter = torch.zeros(1, requires_grad=True, device="cpu")
    parameter.grad = torch.zeros(1, device="cpu")
    return _num_references(parameter)


_ALONE = _alone()
_ONE_TENSOR = num_holders(torch.empty(1, device="cpu"))
