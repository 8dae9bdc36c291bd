"""Outermost calls of the script's models, and of their parts, under torch.autocast.

torch.nn.Module.__call__ is wrapped, and no forward of a class or of a module: nothing of ours is copied, pickled or scripted
with a model, and its forward has the signature that it was written with. Hooks of modules would not do: none is told of a
call that a KeyboardInterrupt ends, and autocast would stay on; and torch.compile takes them into its graph.

Left as they are: calls inside a backward, since whoever runs a forward again there puts the casts of the first run back;
those that are traced or compiled; those where the script has autocast on itself, as inside of a call that has it on.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memadvisor.autocast import AUTOCAST_DTYPES
from memadvisor.cuda_graphs import is_capturing
from memadvisor.engines.script.casting import cast
from memadvisor.engines.script.hooks import CAPTURED, NOT_CAPTURED
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.stages import is_stage
from memadvisor.engines.script.undo import Undo
from memadvisor.errors import PlanError

Note = Callable[[str, str], None]

_BY_ITSELF = "have the script compute under autocast itself, and leave out --autocast."


class _Call:
    """A call that the script makes of a module, and autocast where we have it on for that."""

    __slots__ = ("context", "module")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.context: torch.autocast | None = None


class _Here(threading.local):
    """Of a thread, as torch's own autocast is: the innermost call that is not inside of one with autocast on."""

    call: _Call | None = None
    is_on = False


class AutocastCalls:
    """From construction until `undo` runs. Modules are held weakly."""

    def __init__(self, autocast: str, note: Note, undo: Undo) -> None:
        self._name = AUTOCAST_DTYPES[autocast]
        self._dtype: torch.dtype = getattr(torch, self._name)
        self._note = note
        self._told: set[str] = set()
        self._others: set[int] = set()  # modules that were called and are in no model of ours, by id
        self._here = _Here()
        self._is_hidden = False
        # By id: the module, since another may have its id by now, and the model that it is a part of.
        self._models: dict[int, tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.nn.Module]]] = {}
        undo.add(self._models.clear)
        undo.replace(torch.nn.Module, "__call__", self._around(torch.nn.Module.__call__))

    def attach(self, model: LiveModel) -> None:
        """Raises PlanError for a model that this cannot be done with. A call of it that is under way has autocast on from
        here on."""
        call = self._here.call
        self._check(model.root, call)
        for module in model.root.modules():
            self._models[id(module)] = weakref.ref(module), weakref.ref(model.root)
        if call is not None and not self._here.is_on:
            self._begin(call)

    def _check(self, root: torch.nn.Module, call: _Call | None) -> None:
        name = type(root).__name__
        if any(hasattr(parameter, "device_mesh") for parameter in root.parameters()) or any(
            type(module).__name__ == "FullyShardedDataParallel" for module in root.modules()
        ):
            raise PlanError(
                f"The script shards {name} itself, and autocast would keep copies of weights that it has freed.",
                hint=_BY_ITSELF,
            )
        if is_stage(root):
            raise PlanError(
                f"{name} is a stage of a pipeline, which sends on what a call returns as it is.",
                hint=_BY_ITSELF,
            )
        outer = None if call is None else call.module
        if isinstance(outer, torch.nn.DataParallel) and len(outer.device_ids) > 1:
            raise PlanError(
                f"The script runs {name} in torch.nn.DataParallel, whose threads know no dtype of autocast.",
                hint="use DistributedDataParallel, or leave out --autocast.",
            )
        try:
            torch.autocast(_device_of(root), self._dtype)
        except RuntimeError as error:
            raise PlanError(
                f"torch has no autocast to {self._name} on the device of {name}: {str(error).splitlines()[0]}",
                hint="leave out --autocast.",
            ) from None

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        this, here = weakref.ref(self), self._here
        is_dynamo_compiling = (
            torch.compiler.is_dynamo_compiling
        )  # of all such questions the one that costs least

        @functools.wraps(original)
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Dynamo, which inlines this as it traces a module around, sees no more of it.
            if is_dynamo_compiling() or here.is_on or torch._C._current_graph_task_id() >= 0:
                return original(module, *args, **kwargs)
            calls = this()
            return (
                original(module, *args, **kwargs)
                if calls is None
                else calls._run(original, module, args, kwargs)
            )

        wrapped: Any = call
        self._code = wrapped.__code__
        return call

    def _hide_from_dynamo(self) -> None:
        """Else it would compile our function for each module that the script has compiled, and not the module's forward: all
        of them would share one limit of recompilations."""
        if not self._is_hidden and "torch._dynamo" in sys.modules:
            self._is_hidden = True
            from torch._dynamo.eval_frame import skip_code

            skip_code(self._code)

    def _run(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._hide_from_dynamo()
        here = self._here
        call = _Call(module)
        outer, here.call = here.call, call
        try:
            self._begin(call)
            output = original(module, *args, **kwargs)
        finally:
            here.call = outer
            if (context := call.context) is not None:
                here.is_on = False
                context.__exit__(None, None, None)
        if context is None:
            if outer is None:
                self._tell_of_other(module)
            return output
        return cast(output, torch.float32, lambda tensor: tensor.dtype == self._dtype)

    def _begin(self, call: _Call) -> None:
        """Autocast is on until the call's end, if it is one of a model of ours that this is for."""
        root = self._model_of(call.module)
        is_traced = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
        if root is None or is_traced:
            return
        device = _device_of(root)
        if torch.is_autocast_enabled(device):
            self._tell(f"the script calls {type(root).__name__} under an autocast of its own, which stays")
        elif not any(parameter.dtype is torch.float32 for parameter in root.parameters()):
            self._tell(f"no parameter of {type(root).__name__} is float32: it computes as it is")
        elif is_capturing():  # a graph would replay copies of weights as they are now
            raise PlanError(CAPTURED, hint=NOT_CAPTURED)
        else:
            context = torch.autocast(device, self._dtype)
            context.__enter__()  # type: ignore[no-untyped-call]
            call.context = context
            self._here.is_on = True

    def _model_of(self, module: torch.nn.Module) -> torch.nn.Module | None:
        if type(module).__name__ == "OptimizedModule":  # what torch.compile has made of one
            module = module._orig_mod  # type: ignore[assignment]
        found = self._models.get(id(module))
        return found[1]() if found is not None and found[0]() is module else None

    def _tell_of_other(self, module: torch.nn.Module) -> None:
        """Of a model that trains beside those that the plan is for, and in float32."""
        if not self._models or id(module) in self._others or not torch.is_grad_enabled():
            return
        self._others.add(id(module))
        roots = {
            id(root): root for _, reference in self._models.values() if (root := reference()) is not None
        }
        own = {id(parameter) for root in roots.values() for parameter in root.parameters()}
        if any(parameter.requires_grad and id(parameter) not in own for parameter in module.parameters()):
            self._tell(f"{type(module).__name__} is none of the plan's models, and computes as it is")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note("warning", f"of the plan's autocast: {text}")


def _device_of(root: torch.nn.Module) -> str:
    return next((parameter.device.type for parameter in root.parameters()), "cpu")
