"""Something done around the forwards of a model's units.

The forward of a unit's class is wrapped, not the module: nothing of ours is copied or pickled with the model, and the
script's hooks on the unit itself fire once, around what is done.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from memadvisor.cuda_graphs import is_capturing
from memadvisor.engines.script.hooks import CAPTURED, NOT_CAPTURED, Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.saved import is_in_checkpoint
from memadvisor.errors import PlanError


class Around(Protocol):
    """Who does it, for modules of its own."""

    def applies(self, module: torch.nn.Module) -> bool: ...
    def run(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any: ...


class UnitForwards:
    """The classes that are wrapped on behalf of one, which is held weakly."""

    def __init__(self, around: Around, undo: Undo) -> None:
        self._around = weakref.ref(around)
        self._undo = undo
        self._wrapped: set[type] = set()
        self._running: set[int] = set()  # a class may call the forward of its base class

    def wrap(self, kind: type) -> None:
        if kind in self._wrapped:
            return
        self._wrapped.add(kind)
        original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
        reference, running = self._around, self._running

        @functools.wraps(original)
        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            around = reference()
            if around is None or id(module) in running or not around.applies(module):
                return original(module, *args, **kwargs)
            if is_capturing():
                raise PlanError(CAPTURED, hint=NOT_CAPTURED)
            running.add(id(module))
            try:
                return around.run(original, module, args, kwargs)
            finally:
                running.discard(id(module))

        self._undo.replace(kind, "forward", forward)


def is_to_be_saved(hooks: Hooks, what: str) -> bool:
    """Whether autograd keeps what a forward that begins now saves, for a backward that is not the one under way, and
    not a checkpoint of the script's, which makes it again. `what` is done to it, and to nothing that torch.compile
    compiles: raises PlanError."""
    if torch.compiler.is_compiling():
        raise PlanError(
            f"Activations of a model compiled by torch.compile cannot be {what}.",
            hint="run without torch.compile.",
        )
    return torch.is_grad_enabled() and not hooks.in_backward and not is_in_checkpoint()


def obstacles(model: LiveModel) -> dict[str, str]:
    """Why nothing can be done around a unit's forward, by name of those units."""
    units = {id(unit.module) for unit in model.units}
    found = {}
    for unit in model.units:
        if any(id(module) in units for module in unit.module.modules() if module is not unit.module):
            found[unit.name] = "it contains other units"
        elif "forward" in vars(unit.module):
            found[unit.name] = "the script has replaced its forward"
    return found
