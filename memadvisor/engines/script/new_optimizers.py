"""Optimizers that the script makes once its models follow the plan: what they train may be the plan's model made anew.

Cross-validation makes a model for each part of the data, a search over settings one for each try, and a search for the
largest batch starts over with half of it. A new model is given to a new optimizer before it is called to train.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.undo import Undo


class NewOptimizers:
    """Those made since `wait`, from when on module hooks are off, until the first of them.

    `is_waiting`: `wait` was called, as it never is where modules must always be listened to.
    """

    def __init__(self, hooks: Hooks, undo: Undo) -> None:
        self._hooks = hooks
        self.is_waiting = False
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        make = torch.optim.Optimizer.__init__

        @functools.wraps(make)
        def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            if self.is_waiting:
                self._made.add(optimizer)
                self._hooks.listen_to_modules()

        undo.replace(torch.optim.Optimizer, "__init__", made)

    def wait(self) -> None:
        self._hooks.leave_modules()
        self.is_waiting = True
        self._made.clear()

    def train(self, root: torch.nn.Module) -> bool:
        """Whether one of them has a parameter of this model."""
        own = {id(parameter) for parameter in root.parameters()} if self._made else set()
        groups = [group for optimizer in self._made for group in optimizer.param_groups]
        return any(id(parameter) in own for group in groups for parameter in group["params"])
