"""Optimizers that are given a closure: what is done before it, or behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memadvisor.engines.sharding.owners import Owners
from memadvisor.errors import PlanError


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """That of an optimizer's step, of its arguments with the optimizer itself."""
    found: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return found


def just_before_update(args: Any, kwargs: Any, act: Callable[[], None]) -> tuple[Any, Any] | None:
    """Act now; or behind the step's closure, from which its gradients are. What a step's pre-hook returns."""
    closure = closure_of(args, kwargs)
    if closure is None:
        act()
        return None

    def closure_and_act() -> Any:
        loss = closure()
        act()
        return loss

    return with_closure(args, kwargs, closure_and_act)


def with_closure_done(
    optimizer: torch.optim.Optimizer, owners: Owners | None, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Run a closure now, while the groups hold the parameters that its backward gives gradients to."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    if owners is not None and not owners.calls_closure_once:
        raise PlanError(
            f"{type(optimizer).__name__} does not call its closure once, before its update, as ZeRO stages 1 to 3 need.",
            hint="use --zero 0.",
        )
    with torch.enable_grad():
        loss = closure()
    return with_closure(args, kwargs, lambda: loss)


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> tuple[Any, Any]:
    """The arguments of a step with another closure in place of its own."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}
