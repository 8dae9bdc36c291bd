"""From a plan to its schedule: what lies on another tier or in codes, whoever shards.

**Optimizer state.** Units whose `optimizer_tier` is not the device are updated one after another in the optimizer step,
each while the next one's state is fetched and that of the one before is written. Larger ones take turns with smaller
ones, so that the two buffers are not both as large as the largest. Units with `optimizer_bits` are updated one after
another too, each decoded before and coded after its update. That is done by what computes, so nothing of it runs beside
the updates.

**Activations.** What autograd keeps of a unit whose `activation_tier` is not the device begins to leave after its
forward, under that of the next unit in order of execution, after which it is waited for, and its memory free; and begins
to come back before the backward of that next unit, under it. So of all that is offloaded, at most what two units keep is
in memory at any time. Before the backward of the last unit of all, there is nothing to hide it under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memadvisor.plan import Plan, UnitPlan
from memadvisor.schedule import Lane, Point, ScheduleBuilder


def write_fetched_updates(
    builder: ScheduleBuilder, updated: Sequence[UnitPlan], trainable_bytes: Mapping[str, int]
) -> None:
    """The updates of those of one model's trained units whose state is elsewhere between them, or in codes."""
    away = [unit for unit in updated if unit.optimizer_tier != "device"]
    builder.update_offloaded(
        [(unit.name, Lane(unit.optimizer_tier)) for unit in _in_turns(away, trainable_bytes)]
    )
    builder.update_coded([unit.name for unit in updated if unit.optimizer_bits is not None])


def _in_turns(units: Sequence[UnitPlan], sizes: Mapping[str, int]) -> list[UnitPlan]:
    """The smaller half at the first, third ... place, the larger half between; larger ones before smaller ones."""
    ordered = sorted(units, key=lambda unit: -sizes[unit.name])
    num_large = len(ordered) // 2
    turns = list(ordered)
    turns[0::2], turns[1::2] = ordered[num_large:], ordered[:num_large]
    return turns


def write_transfers(builder: ScheduleBuilder, plan: Plan, chosen: Sequence[UnitPlan]) -> None:
    """The transfers of one model's units. Of two at one boundary, what begins comes before what is waited for in the forward,
    and after it in the backward."""
    if all(unit.activation_tier == "device" for unit in chosen):
        return
    order = _units_in_order(plan, chosen)
    away = [
        (unit.name, Lane(unit.activation_tier), following)
        for unit, following in zip(order, [*(unit.name for unit in order[1:]), None], strict=True)
        if unit.activation_tier != "device"
    ]
    for name, lane, _ in away:
        builder.offload(Point.AFTER_FORWARD, name, name, lane, overlaps=True)
        builder.prefetch(Point.BEFORE_BACKWARD, name, name, lane, overlaps=False)
    for name, lane, following in away:
        if following is None:
            builder.offload(Point.BACKWARD_BEGINS, "", name, lane, overlaps=False)
        else:
            builder.offload(Point.AFTER_FORWARD, following, name, lane, overlaps=False)
            builder.prefetch(Point.BEFORE_BACKWARD, following, name, lane, overlaps=True)


def _units_in_order(plan: Plan, chosen: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Units in order of execution, as far as the plan knows it, without those that run around others."""
    names = {unit.name for unit in chosen}
    place = {unit.name: position for position, unit in enumerate(plan.units)}
    around = {outer for name in names for outer in _outer(name)}
    inner = [unit for unit in chosen if unit.name not in around]
    return sorted(inner, key=lambda unit: place.get(unit.name, 0)) if names <= set(place) else inner


def _outer(name: str) -> list[str]:
    """Names of what a module lies in, the model itself among them."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts))]
