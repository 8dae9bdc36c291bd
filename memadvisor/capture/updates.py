"""The optimizers that have stepped, and when one of their updates ends a training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch

from memadvisor.capture.clock import DeviceMark
from memadvisor.capture.steps import StepCycle
from memadvisor.run.living import living


class Updates:
    """Told of every optimizer step. One that steps inside another's (ZeroRedundancyOptimizer's) is a part of it.

    `parameters` gives those of the models that have been seen. `last_end`: when the last update ended that no
    training step has ended with, None where there is none.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.last_end: float | DeviceMark | None = None
        self._parameters = parameters
        self.cycle = StepCycle(self._expected, self._is_gone)
        self._stepping: list[int] = []
        # By id: there may be one optimizer for each parameter. With each its number, since what a plan shards has
        # other parameters in its groups while it steps.
        self._known: dict[int, tuple[weakref.ref[torch.optim.Optimizer], int]] = {}
        self._firsts: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id of an optimizer's first parameter
        self._numbers = count(1)
        self._makers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}  # by number, the last that was met

    def enter(self, optimizer: torch.optim.Optimizer) -> bool:
        """True: the training step had ended with the previous update."""
        number = self._number_of(optimizer)
        if id(optimizer) in self._stepping:  # an exception ended its last step, and torch told nobody
            del self._stepping[self._stepping.index(id(optimizer)) :]
        self._stepping.append(id(optimizer))
        return len(self._stepping) == 1 and self.cycle.before(number)

    def leave(self, optimizer: torch.optim.Optimizer) -> bool:
        """True: the step was a part of another optimizer's, which goes on."""
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]
        return bool(self._stepping)

    def ends_step(self, optimizer: torch.optim.Optimizer, end: float | DeviceMark | None) -> bool:
        """Whether the update that has ended there ends the training step; None before any model was seen."""
        self.last_end = end
        return self.cycle.after(self._number_of(optimizer))

    def _expected(self) -> list[int]:
        """What may be updated in a step: an optimizer of a model that was never called is another training's, and
        perhaps only waits for the garbage collector."""
        seen = {id(parameter) for parameter in self._parameters()}
        return [
            self._number_of(optimizer)
            for optimizer in existing_optimizers()
            if not seen or any(id(p) in seen for group in optimizer.param_groups for p in group["params"])
        ]

    def _is_gone(self, number: int) -> bool:
        last = self._makers.get(number)
        return last is not None and last() is None

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        known = self._known.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            reference = weakref.ref(optimizer)
            known = self._known[id(optimizer)] = (reference, self._number(optimizer))
            self._makers[known[1]] = reference
        return known[1]

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        """The same for all optimizers of the same parameters, made one after another. What is made where a parameter has lain
        that is gone has another."""
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        first = next(parameters, optimizer)
        known = self._firsts.get(id(first))
        if known is None or known[0]() is not first:
            known = self._firsts[id(first)] = (weakref.ref(first), next(self._numbers))
        return known[1]

    @property
    def is_inside_another(self) -> bool:
        return len(self._stepping) > 1

    @property
    def have_been_seen(self) -> bool:
        return bool(self._known)

    def living(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference, _ in self._known.values() if (optimizer := reference()) is not None]


def existing_optimizers() -> list[torch.optim.Optimizer]:
    """Those of this process whose steps torch's hooks tell of.

    A wrapper around an optimizer (accelerate's) may be one by name, with a step of its own that nobody hears of.
    """
    return [each for each in living(torch.optim.Optimizer) if getattr(type(each).step, "hooked", False)]


def gradient_bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """As large as its parameters that have gradients now."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(
            each.nbytes
            for group in optimizer.param_groups
            for each in group["params"]
            if each.grad is not None and each.layout == torch.strided
        )
