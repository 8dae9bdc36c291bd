"""torch's global hooks, all of them, installed in one place and removed without a trace.

Module forwards (pre and post), optimizer steps (pre and post), the call into the autograd engine, DataLoaders' batches,
the start and the end of the script's own profiler, and of its capturing of CUDA graphs, while which nobody is told of the
others. No full-backward module hooks: they break in-place activations. A hook never raises into the training; the first
failure switches the recorder off.

A module hook runs at every call of every module, so the two of them do nothing before they know that they must.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memadvisor.capture.data_waits import DataWaits
from memadvisor.capture.engine_call import asked_of_engine
from memadvisor.capture.loader_hooks import tell_of_loaders
from memadvisor.capture.open_spans import look_outside
from memadvisor.capture.optimizer_hooks import tell_of_updates
from memadvisor.capture.own_warnings import Silence
from memadvisor.capture.position import Position
from memadvisor.capture.script_modes import past_modes
from memadvisor.capture.training_thread import OTHERS, TrainingThread
from memadvisor.cuda_graphs import CAPTURED, is_of_compiler
from memadvisor.never_compiled import never_compiled, never_compiled_itself

_NUM_ROUNDS, _NUM_CALLS = 7, 60
# Calls of modules, until none with gradients is waited for before the next backward.
_MOST_WITHOUT_GRADIENTS = 50
_FRAMES_OF_CALL = 6


class Observer(Protocol):
    """Who is told: the recorder. `plain_modules` are ids of modules that pass while `position.is_quiet`."""

    @property
    def position(self) -> Position: ...
    @property
    def plain_modules(self) -> set[int]: ...
    def enter_module(self, module: torch.nn.Module, args: Any) -> None: ...
    def leave_module(self, module: torch.nn.Module, args: Any, *rest: Any) -> None: ...
    def enter_backward(self, is_derivative: bool, is_for_parameters: bool) -> None: ...
    def leave_backward(self) -> None: ...
    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...
    def leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...
    def change_thread(self) -> None: ...
    def profiler_starts(self) -> None: ...
    def profiler_ends(self) -> None: ...
    def note(self, level: str, text: str) -> None: ...
    def see_failure(self, error: BaseException | None) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Hooks:
    """Installed at construction, gone after `remove`.

    `num_module_calls` counts the modules that were entered; `quiet_call_s` is what such a call costs where
    the hooks have nothing to do: their own time, and torch's slower way through a module that has hooks.
    Because of the latter, the module hooks can be set aside for some steps (`listen_to_modules`). In these `on_first_call`
    is still told what the first module of a model (`is_of_model`: no loss, no metric) that is called with gradients, in the
    step and after each of its backwards, is called with: a hook that is gone when the modules inside that one are called.
    """

    def __init__(self, observer: Observer, is_of_model: Callable[[torch.nn.Module], bool]) -> None:
        self.num_module_calls = 0
        self.on_first_call: Callable[[Any, Any], None] | None = None
        self._is_of_model = is_of_model
        # Since the last backward. None: nobody waits for a call.
        self._num_calls_without_gradients: int | None = None
        self._is_listening = self._was_listening = True
        self._was_listening_before_capture: bool | None = None  # None: no stream is being captured
        self._misses_capture = self._has_noted_capture = False
        self._observer = observer
        self._thread = TrainingThread(
            observer.position, lambda: observer.note("warning", OTHERS), observer.change_thread
        )
        self.data_waits = DataWaits(self._thread, observer.position, observer.fail)
        self._undo: list[Callable[[], None]] = []
        self.quiet_call_s = self._install_module_hooks()
        before = self._guarded(observer.enter_optimizer, self._begins)
        after = self._guarded(observer.leave_optimizer, self._thread.is_ours)
        self._undo.append(tell_of_updates(before, after))
        self._undo.append(tell_of_loaders(self.data_waits))
        self._wrap_backward()
        self._wrap_profiler()
        self._silence_compile()
        self._hide_from_compilation()
        self._hide_from_capture()

    def listen_to_modules(self, wanted: bool, *, or_first_calls: bool = False) -> None:
        """Put the module hooks in their place, or set them aside, or have the first calls told. Not inside a module's call."""
        self._is_listening = wanted
        self._num_calls_without_gradients = 0 if or_first_calls and not wanted else None
        for hooks, number, hook in self._module_entries:
            if wanted:
                hooks[number] = hook
            else:
                hooks.pop(number, None)
        self._await_first_call()

    def _await_first_call(self) -> None:
        if self._num_calls_without_gradients is not None:
            self._num_calls_without_gradients = 0
            hooks, number, _ = self._module_entries[0]
            hooks[number] = self._first_call

    def _first_call_hook(self) -> Callable[..., None]:
        def see(module: torch.nn.Module, args: Any) -> None:
            if is_compiling() or torch._C._is_tracing():
                return
            hooks, number, _ = self._module_entries[0]
            trains = torch.is_grad_enabled() and self._thread.is_ours() and self._is_of_model(module)
            num_calls = self._num_calls_without_gradients
            if not trains and num_calls is not None and num_calls < _MOST_WITHOUT_GRADIENTS:
                self._num_calls_without_gradients = num_calls + 1
                return
            hooks.pop(number, None)
            if trains and self.on_first_call is not None:
                try:
                    past_modes(self.on_first_call)(args, _keywords_of_call())
                except Exception as error:
                    self._observer.fail(error)

        return never_compiled(see)

    @contextlib.contextmanager
    def second_run(self, module: torch.nn.Module) -> Iterator[None]:
        """An engine runs a module's forward again, past the module's own call, which no hook sees."""
        if not self._is_listening:
            yield
            return
        self._enter(module, ())
        try:
            yield
        finally:
            self._leave(module, (), {}, None)

    def remove(self) -> None:
        self._is_listening = False
        self.data_waits.is_aside = True
        self._num_calls_without_gradients = None
        while self._undo:
            self._undo.pop()()

    def _guarded(
        self, call: Callable[..., None], is_trainings: Callable[[], bool] | None = None
    ) -> Callable[..., None]:
        """`is_trainings` is asked first: whether the pass or update that begins or ends is the training's."""
        call = past_modes(call)

        def guarded(*args: Any) -> None:
            if is_compiling() or not self._undo:  # removed, and inside of somebody else's wrapper
                return
            if self._was_listening_before_capture is not None:
                self._misses_capture = True
                return
            try:
                if is_trainings is None or is_trainings():
                    call(*args)
            except Exception as error:
                self._observer.fail(error)

        return never_compiled(guarded)

    def _begins(self) -> bool:
        return self._thread.begins(trains=True)

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        observer, position, plain = self._observer, self._observer.position, self._observer.plain_modules
        thread = self._thread
        enter_module, leave_module = past_modes(observer.enter_module), past_modes(observer.leave_module)

        def enter(module: torch.nn.Module, args: Any) -> None:
            if is_dynamo_compiling():  # a constant to Dynamo, which inlines hooks; is_compiling costs more
                return
            self.num_module_calls += 1
            if (position.is_quiet and id(module) in plain) or is_compiling() or torch._C._is_tracing():
                return  # torch.jit.trace puts what is asked of a tensor into its graph
            try:
                ident = get_ident()
                if ident != thread.ident and not thread.begins(trains=False):
                    return
                enter_module(module, args)
                if thread.ident != ident and not thread.is_ours():  # another took its place meanwhile
                    thread.withdraw()
            except Exception as error:
                observer.fail(error)

        def leave(module: torch.nn.Module, args: Any, *rest: Any) -> None:
            if is_dynamo_compiling() or (position.is_quiet and id(module) in plain) or is_compiling():
                return
            try:
                if torch._C._is_tracing() or (get_ident() != thread.ident and not thread.is_ours()):
                    return
                leave_module(module, args, *rest)
            except Exception as error:
                observer.fail(error)

        return never_compiled(enter), never_compiled(leave)

    def _install_module_hooks(self) -> float:
        """Returns `quiet_call_s`, measured by a module of ours. Where the script has hooks of its own, they must
        not meet it, and torch's slow way is theirs already: then it is our hooks' own time alone."""
        enter, leave = self._module_hooks()
        nothing, position, plain = _Nothing(), self._observer.position, self._observer.plain_modules
        has_others = torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        plain.add(id(nothing))
        position.is_quiet = True
        try:
            if has_others:
                quiet_call_s = _fastest_s(lambda: (enter(nothing, ()), leave(nothing, (), {}, None)))
                self._register(enter, leave)
                return quiet_call_s
            before_s = _fastest_s(nothing)
            self._register(enter, leave)
            return max(0.0, _fastest_s(nothing) - before_s)
        finally:
            plain.discard(id(nothing))
            position.settle()
            self.num_module_calls = 0

    def _register(self, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._enter, self._leave, self._first_call = enter, leave, self._first_call_hook()
        before = register_module_forward_pre_hook(enter)
        handle = register_module_forward_hook(leave, with_kwargs=True, always_call=True)
        self._undo.append(before.remove)
        module = torch.nn.modules.module
        self._module_entries: list[tuple[dict[int, Callable[..., None]], int, Callable[..., None]]] = [
            (module._global_forward_pre_hooks, before.id, enter),
            (module._global_forward_hooks, handle.id, leave),
        ]

        def undo() -> None:
            handle.remove()
            # torch forgets these two (up to 2.14), and would for ever say that there are global hooks.
            for marks in ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"):
                getattr(module, marks, {}).pop(handle.id, None)

        self._undo.append(undo)

    def _wrap_backward(self) -> None:
        # torch.autograd.backward and .grad both call the engine through this name of their module.
        original, observer = torch.autograd._engine_run_backward, self._observer  # type: ignore[attr-defined]
        enter = self._guarded(lambda *call: observer.enter_backward(*asked_of_engine(*call)), self._begins)
        leave = self._guarded(observer.leave_backward, self._thread.is_ours)
        see_failure = self._guarded(observer.see_failure, self._thread.is_ours)

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            enter(args, kwargs)
            try:
                return original(*args, **kwargs)
            except Exception as error:
                see_failure(error)
                raise
            finally:
                leave()
                look_outside()
                # A reentrant checkpoint has backwards inside the model's, and calls modules between them.
                if not observer.position.backward_depth:
                    self._await_first_call()

        self._replace(torch.autograd, "_engine_run_backward", never_compiled_itself(run_backward))

    def _wrap_profiler(self) -> None:
        # A profiler with a schedule prepares some steps before it is enabled; ours must not come between.
        starts = self._guarded(self._observer.profiler_starts)
        ends = self._guarded(self._observer.profiler_ends)
        for name, tell in (
            ("_prepare_profiler", starts),
            ("_enable_profiler", starts),
            ("_disable_profiler", ends),
        ):
            self._wrap(torch.autograd.profiler, name, tell)

    def _wrap(self, owner: Any, name: str, tell: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tell()
            return original(*args, **kwargs)

        self._replace(owner, name, never_compiled_itself(wrapper))

    def _hide_from_compilation(self) -> None:
        # Dynamo guards a compiled module by how many global hooks there were when it looked: one that is compiled
        # under ours would be compiled anew when they are gone. It does not mind hooks that come later.
        dynamo = sys.modules.get("torch._dynamo.callback")
        handler = getattr(dynamo, "callback_handler", None)
        if handler is None:
            return

        def start(*args: Any) -> None:
            self._was_listening = self._is_listening
            self.listen_to_modules(False)

        def end(*args: Any) -> None:
            self.listen_to_modules(self._was_listening)

        handler.register_start_callback(start)
        handler.register_end_callback(end)

        def undo() -> None:
            for callbacks, ours in ((handler.start_callbacks, start), (handler.end_callbacks, end)):
                if ours in callbacks:  # torch._dynamo.reset() forgets all
                    callbacks.remove(ours)

        self._undo.append(undo)

    def _hide_from_capture(self) -> None:
        """What would be asked or recorded while a stream is captured into a CUDA graph could end the capture."""
        graph = torch.cuda.CUDAGraph
        begin, end = graph.capture_begin, graph.capture_end

        def capture_begin(*args: Any, **kwargs: Any) -> None:
            begin(*args, **kwargs)
            self._was_listening_before_capture, self.data_waits.is_aside = self._is_listening, True
            self.listen_to_modules(False)

        def capture_end(*args: Any, **kwargs: Any) -> None:
            was_listening, self._was_listening_before_capture = self._was_listening_before_capture, None
            self.data_waits.is_aside = False
            try:
                end(*args, **kwargs)
            finally:
                if was_listening:
                    self.listen_to_modules(True)
                if (self._misses_capture or is_of_compiler()) and not self._has_noted_capture:
                    self._has_noted_capture = True
                    self._guarded(self._observer.note)("warning", CAPTURED)

        self._replace(graph, "capture_begin", never_compiled_itself(capture_begin))
        self._replace(graph, "capture_end", never_compiled_itself(capture_end))

    def _silence_compile(self) -> None:
        # A compiled model warns that it sees global hooks; the warning is about us, not about the script.
        silence = Silence(r"Using `torch.compile\(module\)` when there are global hooks", Warning)
        silence.begin()
        self._undo.append(silence.end)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)

        def undo() -> None:
            if getattr(owner, name) is value:  # somebody else's wrapper around ours stays
                setattr(owner, name, original)

        self._undo.append(undo)


def _keywords_of_call() -> Mapping[str, Any]:
    """Of the module's call that a global forward pre-hook is in, which torch does not tell: as torch's own frame has them."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_OF_CALL):
        if frame is None:
            break
        if frame.f_globals is torch.nn.modules.module.__dict__:
            values = frame.f_locals  # a dict that Python fills whenever it is asked for
            if "kwargs" in values:
                keywords: Mapping[str, Any] = values["kwargs"]
                return keywords
        frame = frame.f_back
    return {}


class _Nothing(torch.nn.Module):
    """A module to measure an empty call with."""

    def forward(self) -> None:
        return None


def _fastest_s(call: Callable[[], object]) -> float:
    """Seconds of one call, in the fastest of a few rounds."""
    rounds_s = []
    for _ in range(_NUM_ROUNDS):
        start_s = time.perf_counter()
        for _ in range(_NUM_CALLS):
            call()
        rounds_s.append(time.perf_counter() - start_s)
    return min(rounds_s) / _NUM_CALLS
