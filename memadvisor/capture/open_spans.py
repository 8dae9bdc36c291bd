"""Where torch's profiler may be stopped.

What is under way when it stops writes its end all the same, 16 bytes, to where its event was: memory that is somebody
else's by then. Such are spans that Python code opens and closes (torch's own round `Optimizer.step`, in which a step
ends, and the script's), nodes of autograd's with hooks in them, functions whose forwards are Python's, and operators that
ask what to keep for the backward.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch._C import _current_graph_task_id
from torch.autograd.function import Function
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memadvisor.capture.optimizer_hooks import tell_of_updates
from memadvisor.never_compiled import never_compiled
from memadvisor.run.say import say

_OPERATOR_IN_PYTHON = "__torch_dispatch__"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_called_by_operators: set[CodeType] = set()


def called_by_operators(function: _Function) -> _Function:
    """Operators call this one of ours from inside (a hook on what autograd keeps)."""
    _called_by_operators.add(function.__code__)
    return function


def is_inside_operator() -> bool:
    """Whether what runs in this thread was called by autograd's engine, by a function of the script's or by an operator."""
    if _is_in_backward():
        return True
    inside = _forwards_of_functions() | _called_by_operators
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in inside or frame.f_code.co_name == _OPERATOR_IN_PYTHON:
            return True
        frame = frame.f_back
    return False


def _forwards_of_functions() -> set[CodeType]:
    """Their own, not those of decorators (`torch.no_grad()`), inside of which a whole training may be."""
    found: set[CodeType] = set()
    pending: list[type] = [Function]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        forward: Any = getattr(kind, "forward", None)
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        code = getattr(forward, "__code__", None)
        if code is not None:
            found.add(code)
    return found


_waiting: dict[int, list[Callable[[], None]]] = {}  # by thread


def when_outside_operators(call: Callable[[], None]) -> None:
    """Make `call` at once, or, where something is under way in this thread, as soon as none is: that
    is looked for where a backward ends (`look_outside`), and where modules' calls and updates begin and end.

    What the engine has taken over of a thread's state, its dispatch modes too, it puts back behind each node."""
    if not is_inside_operator():
        call()
        return
    waiting = _waiting.setdefault(threading.get_ident(), [])
    waiting.append(call)
    if len(waiting) == 1:
        look = never_compiled(lambda *_: look_outside())
        handles = [register_module_forward_pre_hook(look), register_module_forward_hook(look)]
        waiting += [handle.remove for handle in handles]
        waiting.append(tell_of_updates(look, look))


def look_outside() -> None:
    """Whether what waits for the end of something in this thread may be done now."""
    if _waiting and threading.get_ident() in _waiting and not is_inside_operator():
        for call in _waiting.pop(threading.get_ident(), ()):
            try:
                call()
            except Exception as error:
                say(f"memadvisor: {type(error).__name__} while it stopped recording")


def _is_in_backward() -> bool:
    return bool(_current_graph_task_id() != -1)


def end_script_spans() -> None:
    """End what Python code has opened; where it is closed in its time, nothing happens any more."""
    for each in gc.get_objects():
        if type(each) is record_function and each.record is not None:
            torch.ops.profiler._record_function_exit._RecordFunction(each.record)
