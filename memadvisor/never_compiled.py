"""Keeping torch.compile away from memadvisor's own functions.

Inside a compiled region Dynamo looks at every Python frame that runs, hooks included. It would compile
ours (and count them), and while it traced them, it would ask their `is_compiling` and find it true for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Dynamo passes over this function, and over all that it calls."""
    return _passed_over(function, callees="SKIP")


def never_compiled_itself(function: _Function) -> _Function:
    """Dynamo passes over this function; what it calls is the script's own business."""
    return _passed_over(function, callees="DEFAULT")


def called_by_python(function: _Function) -> Callable[..., Any]:
    """For a hook of an engine that must run where Dynamo would take it into the graph of its caller: a step of an optimizer
    within a compiled function. Dynamo breaks its graph there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "a plan of memadvisor's is in force"  # type: ignore[attr-defined]
    return never_compiled(call)


def _passed_over(function: _Function, *, callees: str) -> _Function:
    # What torch._dynamo.skip does, without importing Dynamo into scripts that never compile.
    frames = torch._C._dynamo.eval_frame
    actions, strategy = getattr(frames, "_FrameAction", None), getattr(frames, "_FrameExecStrategy", None)
    if actions is not None and strategy is not None:
        wanted = strategy(actions.SKIP, getattr(actions, callees))
        frames.set_code_exec_strategy(function.__code__, wanted)
    return function
