"""Modules around whose calls an engine does nothing, so that no plan recomputes them by themselves."""

from __future__ import annotations

from memadvisor.run.run import RankRun


def modules_left_alone(rank: RankRun) -> frozenset[str]:
    """By name: those whose forward is none of their class, and those that torch.func transforms in some call of the traced step
    (vmap), whose tensors are gone when the backward comes. What is around the transform runs again as anything does."""
    own = {module.name for module in rank.modules if module.is_own_forward}
    return frozenset(own | modules_transformed(rank))


def modules_transformed(rank: RankRun) -> frozenset[str]:
    return frozenset(call.module for call in rank.module_calls if call.is_transformed)
