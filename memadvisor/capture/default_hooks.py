"""Our saved-tensor hooks as the thread's default ones, but never in the way of who must not have any.

`torch.func` (grad, vjp, hessian) forbids saved-tensor hooks while it runs, and raises where there are some
already. Without us there would be none; so ours step aside for as long as they are forbidden.

Hooks that the script has around its training stay above ours, and are asked in place of them, as those are that it puts
around parts of the step: what autograd keeps is theirs to say, and whoever ends them takes the topmost pair.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _autograd

from memadvisor.own_hooks import hooks_aside, is_ours, unseen_by_checkpoints

_Hook = Callable[[Any], Any]
_CHECKPOINT = "torch.utils.checkpoint"  # whose hooks keep nothing but what they run again from


class DefaultHooks:
    """On from construction to `remove`, for the thread that constructs it."""

    def __init__(self, pack: _Hook, unpack: _Hook) -> None:
        self._pair = (pack, unpack)
        self._thread = threading.get_ident()
        self._is_aside = False
        self._disable = _autograd._saved_tensors_hooks_disable
        self._enable = _autograd._saved_tensors_hooks_enable
        self._push = _autograd._push_saved_tensors_default_hooks
        self._seen_again = unseen_by_checkpoints()
        top = _top()
        self.is_below = top is not None and not is_ours(top[0])  # of the script's
        with hooks_aside(lambda pack: not is_ours(pack)):
            _autograd._push_saved_tensors_default_hooks(*self._pair)
        _autograd._saved_tensors_hooks_disable = self._forbid
        _autograd._saved_tensors_hooks_enable = self._allow
        _autograd._push_saved_tensors_default_hooks = self._see_push
        self.are_above = False  # the script has put some of its own around a part of the step

    def remove(self) -> None:
        _autograd._saved_tensors_hooks_disable = self._disable
        _autograd._saved_tensors_hooks_enable = self._enable
        _autograd._push_saved_tensors_default_hooks = self._push
        # Each thread has a stack of its own: another's is not ours to take from.
        if not self._is_aside and threading.get_ident() == self._thread:
            with hooks_aside(lambda pack: pack != self._pair[0]):
                if _top() is not None:
                    _autograd._pop_saved_tensors_default_hooks()
        self._seen_again()

    def _see_push(
        self, pack_hook: Callable[[torch.Tensor], Any], unpack_hook: Callable[[Any], torch.Tensor]
    ) -> None:
        if threading.get_ident() == self._thread:
            self.are_above |= not is_ours(pack_hook) and getattr(pack_hook, "__module__", None) != _CHECKPOINT
        self._push(pack_hook, unpack_hook)

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
        top = _top()
        return top is not None and top[0] == self._pair[0]


def _top() -> tuple[_Hook, _Hook] | None:
    top: tuple[_Hook, _Hook] | None = _autograd._top_saved_tensors_default_hooks(True)
    return top
