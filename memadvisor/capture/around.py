"""Modules in whose calls optimizers step: a trainer's `forward` that runs the loop, or a whole step of it.

What such a module calls is the model of the step, and its own call is no forward pass: a `BYOLTrainer` is called once for
all steps; Lightning calls a model in DistributedDataParallel for `training_step`, which steps where optimization is manual.
A layer that fits something of its own in its forward stays what it is.
"""

from __future__ import annotations

import weakref

import torch

from memadvisor.capture.models import Models
from memadvisor.capture.position import Position
from memadvisor.capture.spans import SpanLog


class Around:
    """Told of every update; takes the modules that run around it off the stack, for good where they are of a model.

    `is_known`: there was such a module.
    """

    def __init__(self, models: Models, position: Position) -> None:
        self._models = models
        self._position = position
        self.is_known = False
        self._of_layers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def see_update(self, optimizer: torch.optim.Optimizer, spans: SpanLog | None) -> None:
        position = self._position
        if not position.stack or position.backward_depth or optimizer in self._of_layers:
            return
        if position.stack[0].is_of_model and not self._trains_model(optimizer):
            self._of_layers.add(optimizer)
            return
        self.is_known = True
        self._models.set_aside(position.stack)
        position.stack.clear()
        position.settle()
        if spans is not None:
            spans.forget_units()

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether a module's own call is none to be told of."""
        info = self._models.info(module) if self.is_known else None
        return info is not None and info.is_around

    def _trains_model(self, optimizer: torch.optim.Optimizer) -> bool:
        known = {id(parameter) for *_, parameter in self._models.parameters()}
        return any(id(each) in known for group in optimizer.param_groups for each in group["params"])
