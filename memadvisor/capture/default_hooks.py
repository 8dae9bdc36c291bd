"""Our saved-tensor hooks as the thread's default ones, but never in the way of who must not have any.

`torch.func` (grad, vjp, hessian) forbids saved-tensor hooks while it runs, and raises where there are some
already. Without us there would be none; so ours step aside for as long as they are forbidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _autograd

from memadvisor.own_hooks import unseen_by_checkpoints

_Hook = Callable[[Any], Any]


class DefaultHooks:
    """On from construction to `remove`, for the thread that constructs it; as deep in the stack as it was then."""

    def __init__(self, pack: _Hook, unpack: _Hook) -> None:
        self._pair = (pack, unpack)
        self._thread = threading.get_ident()
        self._is_aside = False
        self._disable = _autograd._saved_tensors_hooks_disable
        self._enable = _autograd._saved_tensors_hooks_enable
        self._seen_again = unseen_by_checkpoints()
        _autograd._push_saved_tensors_default_hooks(*self._pair)
        _autograd._saved_tensors_hooks_disable = self._forbid
        _autograd._saved_tensors_hooks_enable = self._allow

    def remove(self) -> None:
        _autograd._saved_tensors_hooks_disable = self._disable
        _autograd._saved_tensors_hooks_enable = self._enable
        # Each thread has a stack of its own: another's is not ours to take from.
        if not self._is_aside and threading.get_ident() == self._thread:
            _autograd._pop_saved_tensors_default_hooks()
        self._seen_again()

    def _forbid(self, message: str, *rest: Any, **options: Any) -> None:
        if threading.get_ident() == self._thread and not self._is_aside and self._are_on_top():
            _autograd._pop_saved_tensors_default_hooks()
            self._is_aside = True
        self._disable(message, *rest, **options)

    def _allow(self) -> None:
        self._enable()
        if self._is_aside and threading.get_ident() == self._thread:
            self._is_aside = False
            _autograd._push_saved_tensors_default_hooks(*self._pair)

    def _are_on_top(self) -> bool:
        """Where the script has hooks of its own above ours, torch must raise, as it would without us."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] == self._pair[0]
