"""Tensors of the script's own classes, made while a dispatch mode of ours is on.

What an operator returns under a mode has been a Python object of class Tensor already, and torch refuses to make one of
another class of it: under any mode, `Labelled(x)` and `super().__new__(cls, x)` of a class of the script's end in a
RuntimeError. So our modes step aside while such a tensor is made, as torch's own `_make_subclass` and `as_subclass` have
all modes do. What is made so is a view, or comes from numbers that the script has in Python.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

_lock = threading.Lock()
_num_modes = 0  # of ours, that are on
_original: Any = torch.Tensor.__new__


class SteppingAside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of ours, under which the script's own classes are made as without it."""

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]  # of torch, untyped
        _mode_is_on()
        return entered

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _mode_has_ended()


def _mode_is_on() -> None:
    """From now on, until as many have ended."""
    global _num_modes
    with _lock:
        _num_modes += 1
        if "__new__" not in vars(torch.Tensor) and any(map(_is_scripts, _classes(torch.Tensor))):
            torch.Tensor.__new__ = _made  # type: ignore[method-assign, assignment]


def _mode_has_ended() -> None:
    global _num_modes
    with _lock:
        _num_modes -= 1
        if not _num_modes and vars(torch.Tensor).get("__new__") is _made:
            del torch.Tensor.__new__


def _made(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    mode = None if cls is torch.Tensor else _get_current_dispatch_mode()
    if mode is None or not type(mode).__module__.startswith("memadvisor."):
        return _original(cls, *args, **kwargs)
    with _pop_mode_temporarily():
        return _made(cls, *args, **kwargs)


def _classes(kind: type) -> Iterator[type]:
    found: list[type] = kind.__subclasses__()
    for each in found:
        yield each
        yield from _classes(each)


def _is_scripts(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "memadvisor")
