"""torch's global hooks, all of them, installed in one place and removed without a trace.

Module forwards (pre and post), optimizer steps (pre and post), the call into the autograd engine, and
a start of the script's own profiler. No full-backward module hooks: they break in-place activations.
A hook never raises into the training; the first failure switches the recorder off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Observer(Protocol):
    """Who is told: the recorder."""

    def enter_module(self, module: torch.nn.Module, args: Any) -> None: ...
    def leave_module(self, module: torch.nn.Module, args: Any, *rest: Any) -> None: ...
    def enter_backward(self) -> None: ...
    def leave_backward(self) -> None: ...
    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...
    def leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...
    def profiler_starts(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Hooks:
    """Installed at construction, gone after `remove`."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._undo: list[Callable[[], None]] = []
        guard = self._guarded
        self._undo += [
            register_module_forward_pre_hook(guard(observer.enter_module)).remove,
            self._forward_hook(),
            register_optimizer_step_pre_hook(self._optimizer(observer.enter_optimizer)).remove,
            register_optimizer_step_post_hook(self._optimizer(observer.leave_optimizer)).remove,
        ]
        self._wrap_backward()
        self._wrap_profiler()
        self._silence_compile()

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            try:
                call(*args)
            except Exception as error:
                self._observer.fail(error)

        return guarded

    def _forward_hook(self) -> Callable[[], None]:
        leave = self._guarded(self._observer.leave_module)
        handle = register_module_forward_hook(leave, with_kwargs=True, always_call=True)

        def undo() -> None:
            handle.remove()
            # torch forgets these two (up to 2.13), and would for ever say that there are global hooks.
            for marks in ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"):
                getattr(torch.nn.modules.module, marks, {}).pop(handle.id, None)

        return undo

    def _optimizer(self, call: Callable[[torch.optim.Optimizer], None]) -> Callable[..., None]:
        call = self._guarded(call)
        return lambda optimizer, args, kwargs: call(optimizer)

    def _wrap_backward(self) -> None:
        # torch.autograd.backward and .grad both call the engine through this name of their module.
        original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        enter = self._guarded(self._observer.enter_backward)
        leave = self._guarded(self._observer.leave_backward)

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            enter()
            try:
                return original(*args, **kwargs)
            finally:
                leave()

        self._replace(torch.autograd, "_engine_run_backward", run_backward)

    def _wrap_profiler(self) -> None:
        module = torch.autograd.profiler
        original = module._prepare_profiler  # type: ignore[attr-defined]
        starts = self._guarded(self._observer.profiler_starts)

        def prepare(*args: Any, **kwargs: Any) -> Any:
            starts()
            return original(*args, **kwargs)

        self._replace(module, "_prepare_profiler", prepare)

    def _silence_compile(self) -> None:
        # A compiled model warns that it sees global hooks; the warning is about us, not about the script.
        before = list(warnings.filters)
        warnings.filterwarnings(
            "ignore", message="Using `torch.compile\\(module\\)` when there are global hooks"
        )
        ours = [entry for entry in warnings.filters if entry not in before]

        def undo() -> None:
            for entry in ours:
                if entry in warnings.filters:
                    warnings.filters.remove(entry)  # type: ignore[attr-defined]

        self._undo.append(undo)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)

        def undo() -> None:
            if getattr(owner, name) is value:  # somebody else's wrapper around ours stays
                setattr(owner, name, original)

        self._undo.append(undo)
