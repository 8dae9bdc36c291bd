"""The allocator's own account of a step: every allocation and free, from torch's profiler.

The profiler is driven through its own low-level calls: no report is built, and the event tree is read
directly. An event's time is wall-clock nanoseconds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd as autograd
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _RecordFunctionFast,
)
from torch.autograd.profiler import record_function

from memadvisor.capture.fork_warnings import threads_are_ours
from memadvisor.capture.idle_casts import SeenCast, called_by_script, has_transformed, idle_casts
from memadvisor.capture.open_spans import end_script_spans

_survives_fork: list[bool] = []
_QUIET = "KINETO_LOG_LEVEL"
_BACKWARD_OF = "autograd::engine::evaluate_function: "
_NODES = {RecordScope.BACKWARD_FUNCTION}
# All but what Python code opens and closes, which may be open where recording ends (open_spans.py).
_OPERATORS = {scope for name, scope in RecordScope.__members__.items() if name != "USER_SCOPE"}
_STEP = "memadvisor: traced step"
_ADD, _MODE = "aten::add", "PythonDispatchMode"
_PRIMITIVES = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
}


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """`delta_bytes` > 0 allocates, < 0 frees; totals are the allocator's, after the event.

    `is_meeting`: memory for the sum of two gradients that met in a node, which the engine itself adds; without
    operators all memory that no node of autograd's asked for.
    """

    time_ns: int
    address: int
    delta_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    operator: str
    is_meeting: bool = False


def is_profiler_free() -> bool:
    """Whether nobody else (the script itself) is profiling; torch allows one at a time."""
    return not torch._C._autograd._profiler_enabled()


class AllocatorAccount:
    """Records from construction to `stop`. The first start in a process would print two lines; they are silenced.

    Without `names_operators` events carry no operator, and the profiler remembers memory and autograd's nodes alone: it
    takes some 7 kB and 50 us for an operator, most of them for those that operators call. With them, and what they are
    called with, which takes half as much again, it `sees_casts`: `idle_casts` are there after `stop`.
    """

    def __init__(
        self, device: torch.device, *, names_operators: bool = True, sees_casts: bool = False
    ) -> None:
        self._device = device
        self._names_operators = names_operators
        self._sees_casts = sees_casts and names_operators
        self.idle_casts: list[SeenCast] = []
        self.is_inflated = False  # by what the profiler held, to see casts
        self._span: Any = None
        self._has_script_spans = not names_operators and device.type != "cpu"
        scopes = _OPERATORS if names_operators else _NODES
        if self._has_script_spans:
            scopes = scopes | {RecordScope.USER_SCOPE}
        config = _config(self._sees_casts)
        if not _survives_fork:
            _survives_fork.append(True)
            os.register_at_fork(after_in_child=_leave_without_native_handlers)
        quiet_before = os.environ.get(_QUIET)
        os.environ[_QUIET] = "6"
        try:
            with threads_are_ours():
                autograd._prepare_profiler(config, {ProfilerActivity.CPU})  # type: ignore[attr-defined]
                autograd._enable_profiler(  # type: ignore[attr-defined, call-arg]
                    config, {ProfilerActivity.CPU}, scopes
                )
        finally:
            if quiet_before is None:
                os.environ.pop(_QUIET, None)
            else:
                os.environ[_QUIET] = quiet_before
        if device.type != "cpu":
            # torch's tree leaves out what is on a device and in no span of the host's: all that Python frees.
            span = record_function(_STEP) if self._has_script_spans else _RecordFunctionFast(_STEP)
            span.__enter__()
            self._span = span

    def stop(self, *, has_totals: bool = True) -> list[AllocatorEvent]:
        """End recording; the events of the device, in order of time.

        Memory shared with other processes is reported too, but is not the allocator's: its events carry a
        total of 0, which tells them from the others where the allocator has totals (`has_totals`).
        """
        result = self.disable()
        device, roots = self._device, _outermost(result.experimental_event_tree())
        if self._sees_casts:
            called = called_by_script(roots)
            self.idle_casts, self.is_inflated = idle_casts(called), has_transformed(called)
        of_memory = _memory_nodes if self._names_operators else _nameless_memory_nodes
        events = [
            AllocatorEvent(
                node.start_time_ns,
                fields.ptr,
                fields.alloc_size,
                fields.total_allocated,
                fields.total_reserved,
                name,
                is_meeting and fields.alloc_size > 0,
            )
            for node, name, is_meeting in of_memory(roots)
            if (fields := node.extra_fields).device.type == device.type
            and (device.index is None or fields.device.index in (device.index, -1))
            and (fields.total_allocated or not has_totals)
        ]
        return sorted(events, key=lambda event: event.time_ns)

    def disable(self) -> Any:
        """The same, and make nothing of it."""
        if self._has_script_spans:
            end_script_spans()
        if self._span is not None:
            self._span.__exit__(None, None, None)
        return autograd._disable_profiler()  # type: ignore[attr-defined]


def _leave_without_native_handlers() -> None:
    """Let a forked child of the script end.

    The profiler's library has a thread of its own, which a fork does not copy; its static destructor
    waits for that thread for ever. on_exit runs last-registered first, so `_exit` comes before it, with
    the child's own exit code. Python has finished and flushed by then.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)


def _config(has_shapes: bool) -> ProfilerConfig:
    # kind, shapes, memory, stack, flops, modules
    return ProfilerConfig(ProfilerState.KINETO, has_shapes, True, False, False, False, _ExperimentalConfig())


def _outermost(roots: list[Any]) -> list[Any]:
    """What is in no span but our own."""
    return [node for root in roots for node in (root.children if root.name == _STEP else [root])]


def _memory_nodes(roots: list[Any]) -> Iterator[tuple[Any, str, bool]]:
    """Memory events with the innermost operator around each, and whether it adds gradients that met.

    Without recursion.
    """
    pending = [(root, "", "") for root in roots]
    while pending:
        node, operator, engine = pending.pop()
        name = node.name
        if name == "[memory]":
            yield node, operator, engine == _ADD
            continue
        inner, engine = _inner_operator(operator, name), _under_engine(engine, name)
        pending += [(child, inner, engine) for child in node.children]


def _nameless_memory_nodes(roots: list[Any]) -> Iterator[tuple[Any, str, bool]]:
    """The same without operators: what is in none of autograd's nodes may be the engine's own addition."""
    pending = [(root, True) for root in roots]
    while pending:
        node, is_engines = pending.pop()
        if node.name == "[memory]":
            yield node, "", is_engines
        else:
            pending += [(child, False) for child in node.children]


def _under_engine(engine: str, name: str) -> str:
    """`_BACKWARD_OF` directly below the engine, `_ADD` inside an addition that the engine called; else ""."""
    if name.startswith(_BACKWARD_OF):
        return _BACKWARD_OF
    if engine and name == _ADD:
        return _ADD
    return engine if name == _MODE or (engine == _ADD and name in _PRIMITIVES) else ""


def _inner_operator(outer: str, name: str) -> str:
    """The innermost operator that means something: whoever asks for memory goes through `empty` and its like."""
    if outer and (not name.startswith("aten::") or name in _PRIMITIVES):
        return outer
    return name.removeprefix(_BACKWARD_OF)
