"""From a plan to its schedule: what ZeRO stages, groups of ranks, overlap and recomputation mean as actions.

- Stage 0: all_reduce the unit's gradient after its backward, under the backward of the units that follow:
  the buffer is there anyway, so this costs no memory.
  Where the plan's `algorithms` merge small all-reduces, those of units whose backwards follow each other are one message.
- Stage 1: the same (every rank keeps the whole summed gradient, so a script may still read it), but each
  rank updates its shard alone, and the updated parameters are gathered after the optimizer step.
- Stage 2: reduce_scatter after the backward, then free the rest of the gradient.
- Stage 3: as 2; parameters are gathered before each forward and each backward, unless they are there, and
  released after the backward, and with `reshard` after the forward too. Those that modules of other units
  use as well (tied weights) are never released in between: the last use is where memory is highest as a
  rule, so letting go of them gains nothing and takes two more gathers.
- With `plan.overlap` stage 2 and 3 reduce while the next unit's backward runs, and what stages 1 and 2 have
  updated is gathered under what follows the optimizer step, each unit waited for where its forward begins.
- With `plan.shard_ranks` shards are of, and gathers and reductions to shards among, the ranks of a group; what
  a group has reduced is then summed across the groups, and stages 0 and 1 sum over all ranks at once.
- With `plan.secondary_ranks` what stage 3 releases after a forward leaves a part of a second copy, which so many
  ranks share, and is gathered among these for the backward (hpZ of ZeRO++, arXiv:2306.10209, section 3.2).
- A unit of stage 3 begins with gathering the next `plan.gather_depth` ones of stage 3, in order of
  execution, that are not there yet.
- With `plan.update_in_backward` units of stage 2 and 3 are updated after their reduction, the others where they
  are without it. So is a unit whose parameters modules of other units use: what runs later in the backward may
  need their values. Stages 0 and 1 keep whole gradients because a script may read them.

- With `plan.update_by_unit` the updates in the optimizer step, which are one step of all units otherwise, are done one
  after another, and with `plan.overlap` what stages 1 and 2 have updated begins to be gathered behind its own update, under
  the others'. So do those units of stage 3 that the next forward begins with, up to the first block, or as many blocks as
  are gathered ahead in it: embeddings take no time under which a block could come in.
- Units whose optimizer state lies elsewhere, or is in codes, are updated one after another: write_transfers.py.
- A unit with a `parameter_tier`, on one rank, is one of stage 3 whose gathers are reads from that tier and whose
  reduction is a write to it. Its update takes parameters and gradient along with its state, so it too is one of
  those that are updated one after another.
- What autograd keeps of a unit whose `activation_tier` is not the device: write_transfers.py.

- With `plan.local_sgd`, which is for stage 0, parameters are averaged after the optimizer step; the schedule says of
  which steps, and that others' gradients are reduced.

A unit without trainable parameters has nothing to reduce or update. Of several models each has its own order: nothing
of one is gathered ahead, fetched or moved under another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from memadvisor.merged_reductions import merged_units
from memadvisor.plan import Plan, UnitPlan
from memadvisor.policies import blocks_of, resolve_units
from memadvisor.run.records import Unit
from memadvisor.schedule import Lane, Point, Ranks, Schedule, ScheduleBuilder
from memadvisor.write_fsdp2 import schedule_of_groups
from memadvisor.write_transfers import write_fetched_updates, write_transfers


def write_schedule(plan: Plan, units: Sequence[Unit]) -> Schedule:
    """The schedule that a plan asks of a model with these units, in order of execution."""
    if plan.executor == "fsdp2":
        return schedule_of_groups(plan, units)
    chosen = resolve_units(plan, units)
    trainable = {unit.name for unit in units if unit.trainable_bytes > 0}
    shared = {unit.name for unit in units if unit.is_shared}
    models = _by_model(plan, chosen)
    orders = _orders_of_stage_3(plan, models)
    following, preceding = _neighbours(orders, plan.gather_depth)
    first = _gathered_before_the_forward(plan, orders, chosen, units)
    lanes = {unit.name: _lane_of_gathers(unit) for unit in chosen}
    second = {unit.name for unit in chosen if plan.secondary_ranks and unit.reshard} - shared
    merged = merged_units(plan, models, {unit.name: unit.trainable_bytes for unit in units})
    builder = ScheduleBuilder()
    stretches = plan.unit_stretches
    for unit in chosen:
        name, stage = unit.name, unit.stage_on(plan.num_ranks)
        if stage == 3:
            _gathers(builder, unit, following[name], preceding[name], lanes, shared, second)
        _recomputations(builder, stretches, unit)
        if name in trainable:
            if plan.num_ranks > 1:
                _reductions(builder, plan, name, stage, merged.get(name, ()))
            elif stage == 3:
                builder.reduce(
                    Point.AFTER_BACKWARD,
                    name,
                    name,
                    ranks=Ranks.INSIDE,
                    overlaps=plan.overlap,
                    lane=Lane(unit.parameter_tier),
                )
            _updates(builder, plan, unit, stage, is_shared=name in shared)
            if name in first:
                builder.gather(Point.BEFORE_OPTIMIZER, "", name, overlaps=True)
            if plan.local_sgd is not None:
                builder.average(name)
    sizes = {unit.name: unit.trainable_bytes for unit in units}
    for units_of_model in models:
        updated = [unit for unit in units_of_model if unit.name in trainable]
        write_fetched_updates(builder, updated, sizes)
        write_transfers(builder, plan, units_of_model)
    return builder.schedule(plan, chosen)


def _by_model(plan: Plan, chosen: Sequence[UnitPlan]) -> list[list[UnitPlan]]:
    if len(plan.models) < 2:
        return [list(chosen)]
    owner = {unit.name: plan.model_of(unit.name) for unit in chosen}
    return [[unit for unit in chosen if owner[unit.name] == model.name] for model in plan.models]


def _lane_of_gathers(unit: UnitPlan) -> Lane:
    return Lane.COLLECTIVE if unit.parameter_tier == "device" else Lane(unit.parameter_tier)


def _gathers(
    builder: ScheduleBuilder,
    unit: UnitPlan,
    following: Sequence[str],
    preceding: Sequence[str],
    lanes: Mapping[str, Lane],
    shared: Collection[str],
    second: Collection[str],
) -> None:
    name = unit.name
    for before, after, ahead in (
        (Point.BEFORE_FORWARD, Point.AFTER_FORWARD, following),
        (Point.BEFORE_BACKWARD, Point.AFTER_BACKWARD, preceding),
    ):
        for gathered in (name, *ahead):
            is_second = before is Point.BEFORE_BACKWARD and gathered in second
            ranks = Ranks.SECONDARY if is_second else Ranks.INSIDE
            builder.gather(
                before, name, gathered, overlaps=gathered != name, lane=lanes[gathered], ranks=ranks
            )
        if after is Point.AFTER_BACKWARD:
            builder.release(after, name, name)
        elif unit.reshard and name not in shared:
            builder.release(after, name, name, ranks=Ranks.SECONDARY if name in second else Ranks.ALL)


def _recomputations(builder: ScheduleBuilder, stretches: Sequence[tuple[str, ...]], unit: UnitPlan) -> None:
    for stretch in stretches:
        if stretch[0] == unit.name:
            builder.recompute(stretch)
    if unit.recompute:
        builder.recompute((unit.name,), unit.kept)


def _reductions(builder: ScheduleBuilder, plan: Plan, name: str, stage: int, merged: tuple[str, ...]) -> None:
    at = (Point.AFTER_BACKWARD, name)
    if stage < 2:
        builder.reduce(*at, name, ranks=Ranks.ALL, overlaps=True, merged=merged)
        return
    builder.reduce(*at, name, ranks=Ranks.INSIDE, overlaps=plan.overlap)
    if plan.group_ranks < plan.num_ranks:
        builder.reduce(*at, name, ranks=Ranks.ACROSS, overlaps=plan.overlap)


def _updates(builder: ScheduleBuilder, plan: Plan, unit: UnitPlan, stage: int, *, is_shared: bool) -> None:
    name, is_alone = unit.name, False
    if unit.optimizer_tier != "device" or unit.optimizer_bits is not None:
        pass  # with the others of its kind (update_offloaded)
    elif plan.update_in_backward and stage >= 2 and not is_shared:
        builder.update_early(name, overlaps=plan.overlap)
    else:
        builder.update(name)
        is_alone = plan.update_by_unit
    if stage in (1, 2):
        point = Point.BEFORE_OPTIMIZER if is_alone and plan.overlap else Point.AFTER_OPTIMIZER
        builder.gather(point, "", name, overlaps=plan.overlap)
        if plan.overlap:
            builder.gather(Point.BEFORE_FORWARD, name, name)


def _orders_of_stage_3(plan: Plan, models: Sequence[Sequence[UnitPlan]]) -> list[list[str]]:
    """Units of stage 3 of each model, in the plan's order, which is that of execution, where it names all of them."""
    order = {unit.name: position for position, unit in enumerate(plan.units)}
    orders = []
    for chosen in models:
        sharded = [unit.name for unit in chosen if unit.stage_on(plan.num_ranks) == 3]
        if all(name in order for name in sharded):
            sharded.sort(key=lambda name: order[name])
        orders.append(sharded)
    return orders


def _neighbours(orders: Sequence[list[str]], depth: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """For each unit of stage 3 those to gather ahead in the forward, and in the backward, nearest first."""
    following: dict[str, list[str]] = {}
    preceding: dict[str, list[str]] = {}
    for sharded in orders:
        backwards = sharded[::-1]
        following |= {name: sharded[place + 1 : place + 1 + depth] for place, name in enumerate(sharded)}
        preceding |= {name: backwards[place + 1 : place + 1 + depth] for place, name in enumerate(backwards)}
    return following, preceding


def _gathered_before_the_forward(
    plan: Plan, orders: Sequence[list[str]], chosen: Sequence[UnitPlan], units: Sequence[Unit]
) -> frozenset[str]:
    """Units of stage 3 that begin to be gathered behind their own updates: what is not updated whole, and alone, is not."""
    if not (plan.update_by_unit and plan.overlap and plan.num_ranks > 1):
        return frozenset()
    whole = {unit.name for unit in units if unit.trainable_bytes == unit.parameter_bytes}
    away = {u.name for u in chosen if u.optimizer_tier != "device" or u.optimizer_bits is not None}
    blocks = set(blocks_of(units))
    first = (name for order in orders for name in _up_to_blocks(order, plan.gather_depth, blocks))
    return frozenset(first) & whole - away


def _up_to_blocks(order: Sequence[str], count: int, blocks: Collection[str]) -> Sequence[str]:
    """The first ones, with so many blocks among them; where there is no block, so many."""
    places = [place for place, name in enumerate(order) if name in blocks] or list(range(len(order)))
    return order[: places[min(count, len(places)) - 1] + 1] if count and places else ()
