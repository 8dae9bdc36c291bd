"""Which calls of a recomputed unit keep what they do: counted from one backward to the next, as the plan has them."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from memadvisor.engines.script.hooks import Hooks


class KeptCalls:
    """Of units that a plan says it of; a call beyond those that the plan knows runs again. Modules are held weakly."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._kept: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
        # By module: before which backward, and how many calls.
        self._counts: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def attach(self, module: torch.nn.Module, kept: Collection[int]) -> None:
        self._counts.pop(module, None)
        self._kept.pop(module, None)
        if kept:
            self._kept[module] = frozenset(kept)

    def keeps_next(self, module: torch.nn.Module) -> bool:
        """Whether the call of it that begins now keeps what it does."""
        kept = self._kept.get(module)
        if kept is None:
            return False
        before, number = self._counts.get(module, (-1, 0))
        if before != self._hooks.num_backwards:
            number = 0
        self._counts[module] = self._hooks.num_backwards, number + 1
        return number in kept
