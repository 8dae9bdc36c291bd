"""From a plan to its schedule for a script that uses FSDP2: what happens to its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.plan import Plan, UnitPlan
from memadvisor.policies import resolve_units
from memadvisor.run.records import Unit
from memadvisor.schedule import Point, Ranks, Schedule, ScheduleBuilder
from memadvisor.write_transfers import write_fetched_updates, write_transfers


@dataclass(frozen=True, slots=True)
class _Group:
    """What FSDP2 gathers together, and the first and last unit that run while it is there. `name` is its module's."""

    name: str
    first: str
    last: str
    is_whole: bool
    reshards: bool
    is_trainable: bool


def _groups(plan: Plan, chosen: Sequence[UnitPlan], units: Sequence[Unit]) -> list[_Group]:
    """In order of their gathers in the forward: a module before what is inside it."""
    names = [unit.name for unit in units]
    reshards = {unit.name: unit.reshard for unit in chosen}
    found = []
    for name in dict.fromkeys(unit.shard_group for unit in units):
        if name is None:
            continue
        own = [unit for unit in units if unit.shard_group == name]
        inside = [u.name for u in units if u in own or not name or u.name.startswith(f"{name}.")]
        is_whole = len(inside) == len(units)
        found.append(
            _Group(
                name=name,
                first=inside[0],
                last=inside[-1],
                is_whole=is_whole,
                reshards=(plan.reshard_model or not is_whole) and all(reshards[unit.name] for unit in own),
                is_trainable=any(unit.trainable_bytes for unit in own),
            )
        )
    return sorted(found, key=lambda group: (not group.is_whole, names.index(group.first), len(group.name)))


def schedule_of_groups(plan: Plan, units: Sequence[Unit]) -> Schedule:
    """What FSDP2 does of a plan, in a script that has called `fully_shard`; actions name groups by their modules.

    A group is gathered before its module's forward and before its backward, unless it is there, freed after the
    backward, and with `reshard` after the forward too (with `plan.secondary_ranks` to parts of so many ranks, which gather
    it for the backward among themselves); what no group inside the model has stays from the model's
    forward to the end of the backward, or with `plan.reshard_model` is freed and gathered like the others. Gradients are
    reduced after the group's backward, and where several groups of ranks hold the same shards (HSDP) what that leaves is
    summed across these. A group begins with gathering the next `plan.gather_depth` ones. The script's optimizer updates all
    of them at once, or with `plan.update_by_unit` one unit after another; so it does units whose state is elsewhere or in codes.
    """
    chosen = resolve_units(plan, units)
    groups = _groups(plan, chosen, units)
    inner = [group for group in groups if not group.is_whole]
    builder = ScheduleBuilder()

    has_parts = plan.secondary_ranks is not None
    left = Ranks.SECONDARY if has_parts else Ranks.ALL

    def gather(point: Point, unit: str, group: _Group | None, ahead: Sequence[_Group]) -> None:
        takes_parts = has_parts and point in (Point.BEFORE_BACKWARD, Point.BACKWARD_BEGINS)
        near = {other.name for other in groups if takes_parts and other.reshards}

        def ranks(one: _Group) -> Ranks:
            return Ranks.SECONDARY if one.name in near else Ranks.INSIDE

        if group is not None:
            builder.gather(point, unit, group.name, ranks=ranks(group))
        for other in ahead[: plan.gather_depth]:
            builder.gather(point, unit, other.name, overlaps=True, ranks=ranks(other))

    whole = next((group for group in groups if group.is_whole), None)
    gather(Point.FORWARD_BEGINS, "", whole, inner)
    for place, group in enumerate(inner):
        gather(Point.BEFORE_FORWARD, group.first, group, inner[place + 1 :])
        if group.reshards:
            builder.release(Point.AFTER_FORWARD, group.last, group.name, ranks=left)
    is_freed = whole is not None and whole.reshards
    if whole is not None and is_freed:
        builder.release(Point.FORWARD_ENDS, "", whole.name, ranks=left)
    gather(Point.BACKWARD_BEGINS, "", whole if is_freed else None, inner[::-1])
    for place, group in reversed(list(enumerate(inner))):
        gather(Point.BEFORE_BACKWARD, group.last, group, inner[:place][::-1])
    for group in [*inner[::-1], *([whole] if whole else [])]:
        at = (Point.BACKWARD_ENDS, "") if group.is_whole else (Point.AFTER_BACKWARD, group.first)
        builder.release(*at, group.name)
        if group.is_trainable:
            builder.reduce(*at, group.name, ranks=Ranks.INSIDE, overlaps=plan.overlap)
            if plan.group_ranks < plan.num_ranks:
                builder.reduce(*at, group.name, ranks=Ranks.ACROSS, overlaps=plan.overlap)
    _updates(builder, plan, chosen, units, groups)
    for unit in chosen:
        if unit.recompute:
            builder.recompute((unit.name,), unit.kept)
    write_transfers(builder, plan, chosen)
    return builder.schedule(plan, chosen)


def _updates(
    builder: ScheduleBuilder,
    plan: Plan,
    chosen: Sequence[UnitPlan],
    units: Sequence[Unit],
    groups: Sequence[_Group],
) -> None:
    sizes = {unit.name: unit.trainable_bytes for unit in units if unit.trainable_bytes}
    trained = [unit for unit in chosen if unit.name in sizes]
    fetched = {u.name for u in trained if u.optimizer_tier != "device" or u.optimizer_bits is not None}
    if plan.update_by_unit:
        for unit in trained:
            if unit.name not in fetched:
                builder.update(unit.name)
    else:
        of_group = {group.name: {u.name for u in units if u.shard_group == group.name} for group in groups}
        for group in reversed(groups):
            if group.is_trainable and not of_group[group.name] & fetched:
                builder.update(group.name)
    write_fetched_updates(builder, trained, sizes)
