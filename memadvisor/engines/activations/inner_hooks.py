"""Forward hooks of a script's on modules inside a unit that look at outputs and do no more: they fire once.

A second run calls such modules again, and would have each hook count, average or collect what it has seen already
(statistics of activations, gradients of single samples). A hook has looked and done no more where each of its calls in
the first run returned None, changed nothing about the output, held no reference to it, had autograd save nothing and
drew no numbers. All others fire again: what they return, save, draw, or hand to a later module of the unit is part of
the forward.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states

Hook = Callable[..., Any]
Aside = Callable[[], contextlib.AbstractContextManager[None]]
Key = tuple[int, int]  # id of a module, which its unit holds; number of a hook


def _fired_before(*arguments: Any) -> None:
    """In the place of a hook that has fired in the first run."""


class InnerHooks:
    """By unit, the modules inside it. Modules are held weakly."""

    def __init__(self) -> None:
        self._inside: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[torch.nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, unit: torch.nn.Module) -> FiringOnce | None:
        """For one call of the unit; None where no module inside has a forward hook, as is usual."""
        inside = self._inside.get(unit)
        if inside is None:
            inside = [weakref.ref(module) for module in unit.modules() if module is not unit]
            self._inside[unit] = inside
        hooked = [found for module in inside if (found := module()) is not None and found._forward_hooks]
        return FiringOnce(hooked) if hooked else None


class FiringOnce:
    """Forward hooks inside a unit, for one call of it and the second runs of that."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._looking: dict[Key, bool] = {}  # whether it does no more, of those that have fired
        self._aside: Aside = contextlib.nullcontext

    @contextlib.contextmanager
    def first_run(
        self, num_saved: Callable[[], int], aside: Aside = contextlib.nullcontext
    ) -> Iterator[None]:
        """`num_saved`: how many tensors autograd has saved for the unit so far. `aside`: what hooks fire inside, in all runs."""
        self._aside = aside
        with self._replaced(lambda key, hook: self._watched(key, hook, num_saved)):
            yield

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        with self._replaced(lambda key, hook: _fired_before if self._looking.get(key) else self._again(hook)):
            yield

    def _again(self, hook: Hook) -> Hook:
        def again(*arguments: Any) -> Any:
            with self._aside():
                return hook(*arguments)

        return again

    def _watched(self, key: Key, hook: Hook, num_saved: Callable[[], int]) -> Hook:
        if hook is _fired_before:  # within a second run of a unit around
            self._looking[key] = True
            return hook

        def watched(*arguments: Any) -> Any:
            with self._aside():
                before = num_saved(), _state_of(arguments[-1])
                returned = hook(*arguments)
                looked = returned is None and before == (num_saved(), _state_of(arguments[-1]))
            self._looking[key] = looked and self._looking.get(key, True)
            return returned

        return watched

    @contextlib.contextmanager
    def _replaced(self, put: Callable[[Key, Hook], Hook]) -> Iterator[None]:
        """Entries alone change, in the script's own dictionaries: a hook may remove itself meanwhile."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        found = [
            (module._forward_hooks, number, hook, put((id(module), number), hook))
            for module in modules
            for number, hook in module._forward_hooks.items()
        ]
        for hooks, number, _, other in found:
            hooks[number] = other
        try:
            yield
        finally:
            for hooks, number, hook, other in found:
                if hooks.get(number) is other:
                    hooks[number] = hook


def _state_of(output: Any) -> list[Any]:
    """What changes where somebody writes into an output's tensors, asks for their gradients, keeps them, or draws numbers."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return [
        sys.getrefcount(output),
        *(
            (0 if leaf.is_inference() else leaf._version, leaf.requires_grad, sys.getrefcount(leaf))
            for leaf in leaves
        ),
        *(bytes(state.numpy()) for state in (torch.get_rng_state(), *get_device_states(*leaves)[1])),
    ]
