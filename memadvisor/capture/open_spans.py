"""Where torch's profiler may be stopped.

What is under way when it stops writes its end all the same, 16 bytes, to where its event was: memory that is somebody
else's by then. Such are spans that Python code opens and closes (torch's own round `Optimizer.step`, in which a step
ends, and the script's), nodes of autograd's with hooks in them, and functions whose forwards are Python's.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.autograd.function import Function
from torch.autograd.profiler import record_function

_OPERATOR_IN_PYTHON = "__torch_dispatch__"


def is_inside_operator() -> bool:
    """Whether what runs in this thread was called by autograd's engine, by a function of the script's or by an operator."""
    if _is_in_backward():
        return True
    forwards = _forwards_of_functions()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in forwards or frame.f_code.co_name == _OPERATOR_IN_PYTHON:
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


def when_backward_is_over(call: Callable[[], None]) -> None:
    """Make `call` at once, or, where autograd's engine is at work in this thread, when `see_backward_end` is told.

    What the engine has taken over of a thread's state, its dispatch modes too, it puts back behind each node."""
    if _is_in_backward():
        _waiting.setdefault(threading.get_ident(), []).append(call)
    else:
        call()


def see_backward_end() -> None:
    """A backward has ended in this thread, maybe inside another."""
    if _waiting and not _is_in_backward():
        for call in _waiting.pop(threading.get_ident(), ()):
            call()


def _is_in_backward() -> bool:
    return bool(_current_graph_task_id() != -1)


def end_script_spans() -> None:
    """End what Python code has opened; where it is closed in its time, nothing happens any more."""
    for each in gc.get_objects():
        if type(each) is record_function and each.record is not None:
            torch.ops.profiler._record_function_exit._RecordFunction(each.record)
