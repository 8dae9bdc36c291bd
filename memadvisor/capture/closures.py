"""Which passes evaluate the closure of an optimizer's step once more: L-BFGS looks at one batch from many places.

The script may have made its tensors anew for each (the points of an equation, a batch that it brings to the device there),
so the very tensors do not tell. Gradients do: what accumulates adds to those of the pass before, and a closure that is
evaluated once more has dropped them, before its forward or behind it.
"""

from __future__ import annotations

import weakref

import torch

from memadvisor.capture.open_step import OpenStep
from memadvisor.capture.samples import SeenBatches


class ClosurePasses:
    """Of the optimizer step that is under way, if any. What its closure's further evaluations are given is not counted."""

    def __init__(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._has_gradients = self._comes_again = False
        self._num_repeated = 0
        self._counted: dict[str, tuple[int | None, int | None]] = {}

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        self.leave()
        self._optimizer = weakref.ref(optimizer)

    def leave(self) -> None:
        self._optimizer = None
        self._has_gradients = self._comes_again = False
        self._num_repeated = 0
        self._counted = {}

    def before_backward(self, step: OpenStep) -> None:
        if not self._has_gradients:
            return
        self._comes_again = self._comes_again or not self._are_there()
        if not self._comes_again:
            return
        for name, given in step.given.items():
            given.num_samples, given.num_tokens = self._counted.get(name, (0, 0))
        if step.seen is None:
            step.seen = SeenBatches()
        if step.seen.num_repeated == self._num_repeated:  # by the very tensors
            step.seen.num_repeated += 1
        self._num_repeated = step.seen.num_repeated

    def after_backward(self, step: OpenStep) -> None:
        if self._optimizer is None or self._comes_again:
            return
        self._has_gradients = self._has_gradients or self._are_there()
        self._num_repeated = 0 if step.seen is None else step.seen.num_repeated
        self._counted = {name: (given.num_samples, given.num_tokens) for name, given in step.given.items()}

    def _are_there(self) -> bool:
        optimizer = None if self._optimizer is None else self._optimizer()
        with torch._C.DisableTorchFunctionSubclass():
            groups = () if optimizer is None else optimizer.param_groups
            return any(each.grad is not None for group in groups for each in group["params"])
