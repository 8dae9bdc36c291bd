"""torch's global hooks as the engine needs them; nothing is left on the script's own modules.

Hooks on modules would be copied by `copy.deepcopy` and refused by `torch.save(model)`, so global hooks
look the module up by its id instead. No full-backward module hooks: they break in-place activations.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memadvisor.cuda_graphs import is_capturing
from memadvisor.engines.script.undo import Undo
from memadvisor.errors import PlanError
from memadvisor.never_compiled import called_by_python
from memadvisor.own_hooks import unseen_by_checkpoints

_COMPILED = "This plan cannot be applied to a model compiled by torch.compile."
_NOT_COMPILED = "run without torch.compile, or use --zero 0 to 2 without recomputation."
_TRACED = (
    "The script draws a model by torch.jit.trace, whose parameters ZeRO stage 3 has not there between uses."
)
_NOT_TRACED = "use --zero 2, draw it before DistributedDataParallel has it, or draw a copy (copy.deepcopy)."
CAPTURED = "This plan cannot be applied to a model that the script captures into a CUDA graph."
NOT_CAPTURED = "run without the graph, or without a plan."


class ModuleObserver(Protocol):
    """Who is told of the calls of its own modules, and of every backward.

    needs_units: whether it would be wrong not to be told of a module that runs compiled.
    """

    @property
    def needs_units(self) -> bool: ...

    def enter_module(self, module: torch.nn.Module) -> None: ...
    def leave_module(self, module: torch.nn.Module, output: Any) -> None: ...
    def backward_begins(self) -> None: ...
    def backward_ends(self, failed: bool) -> None: ...


class StepObserver(Protocol):
    """Who is told of every outermost forward without an observer, and of every optimizer step."""

    def unknown_module(self, module: torch.nn.Module) -> None: ...
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any: ...
    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...


class Hooks:
    """Installed at construction. Observers are held weakly: a model dies when the script lets go of it."""

    def __init__(self, steps: StepObserver, undo: Undo) -> None:
        self._steps = steps
        self._by_module: dict[int, weakref.ref[ModuleObserver]] = {}
        self._never_compiled: set[int] = set()  # modules by id; Dynamo cannot look through weak references
        self._observers: weakref.WeakSet[ModuleObserver] = weakref.WeakSet()
        self._depth = 0
        self.num_backwards = 0  # that have begun
        self.makes_graph = False  # the backward that runs: create_graph=True
        self._calls = 0
        self._of_modules: tuple[RemovableHandle, ...] = ()
        self.listen_to_modules()
        undo.add(unseen_by_checkpoints())  # the saved-tensor hooks of whom these hooks tell
        undo.add(self.leave_modules)
        self._around_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )
        undo.add(register_optimizer_step_pre_hook(called_by_python(self._come_innermost)).remove)
        undo.add(register_optimizer_step_post_hook(called_by_python(self._after_step)).remove)
        undo.add(self._leave_steps)
        self._wrap_backward(undo)

    @property
    def in_backward(self) -> bool:
        return self._depth > 0

    def listen_to_modules(self) -> None:
        """Not inside of a module's call."""
        self.leave_modules()
        self._calls = 0
        self._of_modules = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )

    def leave_modules(self) -> None:
        """Nobody asks for modules any more: from now on their calls cost what they cost without us."""
        for handle in self._of_modules:
            handle.remove()
        self._of_modules = ()

    def observe(self, observer: ModuleObserver, modules: set[int]) -> None:
        reference = weakref.ref(observer)
        self._observers.add(observer)
        for module in modules:
            self._by_module[module] = reference
        if observer.needs_units:
            self._never_compiled |= modules

    def forget(self, observer: ModuleObserver) -> None:
        self._observers.discard(observer)
        for module in [m for m, reference in self._by_module.items() if reference() in (observer, None)]:
            del self._by_module[module]
            self._never_compiled.discard(module)

    def _observer(self, module: torch.nn.Module) -> ModuleObserver | None:
        reference = self._by_module.get(id(module))
        return reference() if reference is not None else None

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # Dynamo takes this hook into its graph
            if id(module) in self._never_compiled:
                raise PlanError(_COMPILED, hint=_NOT_COMPILED)
            return
        # torch 2.11's Dynamo cannot raise that: what torch.compile returned for a module is asked before it is traced.
        compiled = module._modules.get("_orig_mod") if self._never_compiled else None
        if compiled is not None and any(id(part) in self._never_compiled for part in compiled.modules()):
            raise PlanError(_COMPILED, hint=_NOT_COMPILED)
        observer = self._observer(module)
        if (
            observer is None and torch._C._is_tracing()
        ):  # what is asked of tensors would be in torch.jit.trace's graph
            return
        if observer is not None and observer.needs_units and torch._C._is_tracing():
            # What it makes would read memory that is no longer there.
            raise PlanError(_TRACED, hint=_NOT_TRACED)
        if observer is not None and is_capturing():  # replayed, it would use memory that is no longer its
            raise PlanError(CAPTURED, hint=NOT_CAPTURED)
        self._calls += 1
        if observer is None:
            if self._calls == 1:
                self._steps.unknown_module(module)
                observer = self._observer(module)  # who has taken it over
            if observer is None:
                return
        observer.enter_module(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        observer = self._observer(module)
        if observer is None and torch._C._is_tracing():
            return
        self._calls = max(0, self._calls - 1)
        if observer is not None:
            observer.leave_module(module, output)

    def _come_innermost(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Torch calls hooks on an optimizer itself behind global ones before a step, and sooner after it: ours is the last of
        them, and where the script has some of its own the first of them too, which find parameters, gradients and state as
        they are without us. Else it is global, behind the recorder's: what is brought then is the next step's."""
        before: Any = optimizer._optimizer_step_pre_hooks  # ordered, which torch does not say
        after: Any = optimizer._optimizer_step_post_hooks
        own = self._around_steps.setdefault(optimizer, {})
        if "before" not in own or own["before"].id not in before:  # or it was loaded since
            hook = called_by_python(self._steps.before_step)
            own["before"] = torch.optim.Optimizer.register_step_pre_hook(optimizer, hook)
        before.move_to_end(own["before"].id)
        if "after" not in own and after:
            hook = called_by_python(self._after_step)
            own["after"] = torch.optim.Optimizer.register_step_post_hook(optimizer, hook)
        if "after" in own and own["after"].id in after:
            after.move_to_end(own["after"].id, last=False)

    def _leave_steps(self) -> None:
        for handles in list(self._around_steps.values()):
            for handle in handles.values():
                handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps.after_step(optimizer)

    def _in_order(self) -> list[ModuleObserver]:
        """Executors in order of their construction, alike on all ranks: at a backward's end each has collectives."""
        return sorted(self._observers, key=lambda observer: getattr(observer, "number", -1))

    def _wrap_backward(self, undo: Undo) -> None:
        # torch.autograd.backward and .grad both call the engine through this name of their module.
        original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            failed = True
            try:
                if self._depth == 1:
                    self.num_backwards += 1
                    # After the tensors: their gradients, retain_graph, create_graph.
                    self.makes_graph = bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))
                    for observer in self._in_order():
                        observer.backward_begins()
                result = original(*args, **kwargs)
                failed = False
            finally:
                self._depth -= 1
                if self._depth == 0:
                    for observer in self._in_order():
                        observer.backward_ends(failed)
            return result

        undo.replace(torch.autograd, "_engine_run_backward", run_backward)
