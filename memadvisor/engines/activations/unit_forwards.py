"""Something done around the forwards of a model's units.

The forward of a unit's class is wrapped, not the module: nothing of ours is copied or pickled with the model, and the
script's hooks on the unit itself fire once, around what is done. What torch.compile has made of a module has a forward
of its own, which is found first, unless its class has a descriptor in that name.
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
from memadvisor.never_compiled import never_compiled
from memadvisor.run.own_forwards import is_made_by_compiler, why_not_wrapped


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
        self._compiled: dict[type, _CompiledForwards] = {}
        self._ours: set[int] = set()  # modules by id; Dynamo cannot look through weak references
        self._running: set[int] = set()  # a class may call the forward of its base class

    def wrap(self, module: torch.nn.Module) -> None:
        """Wrap the forward of a module, and of those of its class that `around` is for."""
        kind = type(module)
        self._ours.add(id(module))
        original: Callable[..., Any] = kind.forward
        if is_made_by_compiler(module):
            if kind not in self._compiled:
                self._compiled[kind] = _CompiledForwards(original, self._wrapper)
                self._undo.replace(kind, "forward", self._compiled[kind])
            self._compiled[kind].modules.add(module)
        elif kind not in self._wrapped:
            self._wrapped.add(kind)
            self._undo.replace(kind, "forward", self._wrapper(original))

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        reference, running, ours = self._around, self._running, self._ours

        @functools.wraps(original)
        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # One of a wrapped class inside of what torch.compile compiles.
            if torch.compiler.is_compiling() and id(module) not in ours:
                return original(module, *args, **kwargs)
            around = reference()
            if around is None or id(module) in running or _is_transformed() or not around.applies(module):
                return original(module, *args, **kwargs)
            if is_capturing():
                raise PlanError(CAPTURED, hint=NOT_CAPTURED)
            running.add(id(module))
            try:
                return around.run(original, module, args, kwargs)
            finally:
                running.discard(id(module))

        return forward


def _is_transformed() -> bool:
    """Whether torch.func transforms what is called now: its gradients allow no hooks on saved tensors, and its tensors are
    gone when autograd's backward comes. Or torch.jit.trace watches it, which would take what is done around it into its graph."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()


class _CompiledForwards:
    """The forwards of what torch.compile has made of modules, of one class: each module has its own, and of those in
    `modules` it is wrapped. `below`: what the class had in this name, which may be another of these."""

    def __init__(
        self, below: Callable[..., Any], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._below = below
        self._wrapper = wrapper

    @never_compiled  # Dynamo calls modules of this class itself: what it makes for DDP's buckets
    def __get__(self, module: torch.nn.Module | None, kind: type) -> Any:
        if module is None:
            return self
        own: Callable[..., Any] | None = vars(module).get("forward")
        if isinstance(self._below, _CompiledForwards) or own is None:
            own = self._below.__get__(module, kind)
        if module not in self.modules:
            return own
        return functools.partial(self._wrapper(functools.partial(_without_module, own)), module)

    def __set__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        vars(module)["forward"] = forward

    def __delete__(self, module: torch.nn.Module) -> None:
        del vars(module)["forward"]

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(module, type(module))(*args, **kwargs)


def _without_module(forward: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


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
        elif reason := why_not_wrapped(unit.name, unit.module):
            found[unit.name] = reason
    return found
