"""Which units' all-reduces go in one message: small ones whose backwards follow each other (stages 0 and 1).

A message costs about the same whatever it holds, as long as it is small; where a plan's `algorithms` say below how many
bytes that was measured, gradients are copied into one buffer, summed there, and copied back. Each element is summed with
the same elements of the other ranks, so on two ranks nothing changes, bit for bit; on more the backend may add up ranks in
another order, as it does for other sizes of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memadvisor.executors import merged_below
from memadvisor.plan import Plan, UnitPlan


def merged_units(
    plan: Plan, models: Sequence[Sequence[UnitPlan]], trainable_bytes: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """For each unit whose gradients share a message all units that do, in order of their backwards. Of one alone: none.

    models: of each model its units. Compressed gradients, and those of steps that Local SGD leaves out, go by themselves.
    """
    limit_bytes = merged_below(plan.algorithms, plan.num_ranks)
    if not limit_bytes or plan.compression.has_feedback or plan.local_sgd is not None:
        return {}
    place = {unit.name: position for position, unit in enumerate(plan.units)}
    groups: list[list[str]] = []
    for units in models:
        groups.append([])
        size_bytes = 0
        for unit in sorted(units, key=lambda unit: place.get(unit.name, len(place)), reverse=True):
            own_bytes = trainable_bytes.get(unit.name, 0)
            if not own_bytes:
                continue
            if unit.stage_on(plan.num_ranks) >= 2 or own_bytes >= limit_bytes:
                groups.append([])
                size_bytes = 0
                continue
            if size_bytes + own_bytes >= limit_bytes:
                groups.append([])
                size_bytes = 0
            groups[-1].append(unit.name)
            size_bytes += own_bytes
    return {name: tuple(group) for group in groups if len(group) > 1 for name in group}
