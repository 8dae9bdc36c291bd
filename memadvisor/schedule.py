"""The schedule: which action happens at which boundary of a step.

The simulator (memadvisor/cost/simulate.py) plays it against measured costs, the executor
(memadvisor/engines/executor.py) plays the very same object on the live model. What a ZeRO stage or a
checkpoint *means* is therefore written once, here, as actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from memadvisor.compression import UNCOMPRESSED, Compression
from memadvisor.executors import Algorithm, all_native
from memadvisor.plan import Plan, UnitPlan
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.records import Unit


class Point(StrEnum):
    """Where in a step: around a unit's forward, around its backward, around the optimizer step.

    Around the whole model's forward, and all of a backward: where FSDP2 gathers and reduces what no group inside the
    model has.
    """

    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    BEFORE_OPTIMIZER = "before_optimizer"
    AFTER_OPTIMIZER = "after_optimizer"
    FORWARD_BEGINS = "forward_begins"
    FORWARD_ENDS = "forward_ends"
    BACKWARD_BEGINS = "backward_begins"
    BACKWARD_ENDS = "backward_ends"


class ActionKind(StrEnum):
    """What is done to a unit.

    gather: make its full parameters present. release: free them, keep the shard. reduce: sum its
    gradients over the ranks, leaving all of them (all_reduce) or this rank's shard (reduce_scatter) as
    `shard` says. recompute: run the forward without saving, and again in the backward (of several units,
    before the backward of the last one). update: step
    the optimizer on what this rank holds; after a backward that is the last one of a step, and frees the
    gradient shard.
    """

    GATHER = "gather"
    RELEASE = "release"
    REDUCE = "reduce"
    RECOMPUTE = "recompute"
    UPDATE = "update"


class Lane(StrEnum):
    """What an action occupies; lanes run at the same time, actions of one lane one after another."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"


class Ranks(StrEnum):
    """Who takes part in a collective.

    inside: the ranks that share what is sharded, all ranks without hybrid sharding. across: those that hold the
    same shard, one of each group.
    """

    ALL = "all"
    INSIDE = "inside"
    ACROSS = "across"


@dataclass(frozen=True, slots=True)
class Boundary:
    point: Point
    unit: str  # "" with BEFORE_OPTIMIZER and AFTER_OPTIMIZER, and around the whole model


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """`shard` matters to `reduce` alone: True leaves each rank its shard of the sum and frees the rest.

    ranks: of a collective. A reduction across is of the shards that the reduction inside, just before it, leaves.
    overlaps: compute goes on meanwhile. What waits is, for a gather, the next gather of the same unit that
    does not overlap; for a reduce to shards, the next reduce; for every reduce, the backward's end. Without
    it compute waits where the action stands. An update never runs beside compute: one that overlaps follows a
    reduce that does, and is put off until that is over: behind the next reduce, which then runs under it, or at
    the backward's end.
    units: of a recompute, all units that run without saving, and again as one, in order of execution; the boundary is
    the first one's. Of two at one boundary the first holds the second, and what is held runs again by itself.
    """

    kind: ActionKind
    unit: str
    lane: Lane
    shard: bool = False
    overlaps: bool = False
    ranks: Ranks = Ranks.ALL
    units: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions by boundary. `units` are in order of execution; `shard_ranks` of `num_ranks` share each sharded unit.

    With gradient accumulation, a `reduce` with `shard` happens in every micro-batch (its memory is the point),
    one without `shard` in those that the script lets DDP synchronise. `precision`: in what dtype gathers make
    parameters present, and reductions to shards sum. `compression`: what their messages hold. `executor` and
    `algorithms` are the plan's.
    """

    num_ranks: int
    shard_ranks: int
    units: tuple[UnitPlan, ...]
    actions: dict[Boundary, tuple[Action, ...]]
    precision: Precision = FULL_PRECISION
    compression: Compression = UNCOMPRESSED
    executor: str = "built-in"
    algorithms: tuple[Algorithm, ...] = ()

    def size_of(self, ranks: Ranks) -> int:
        """How many ranks take part."""
        sizes = {
            Ranks.ALL: self.num_ranks,
            Ranks.INSIDE: self.shard_ranks,
            Ranks.ACROSS: self.num_ranks // self.shard_ranks,
        }
        return sizes[ranks]

    @property
    def is_native(self) -> bool:
        """Whether all gathers and reductions to shards are left to the backend."""
        return all_native(self.algorithms)

    def at(self, point: Point, unit: str = "") -> tuple[Action, ...]:
        return self.actions.get(Boundary(point, unit), ())

    @property
    def stretches(self) -> tuple[tuple[str, ...], ...]:
        """Units that are run again, as one, for each recompute."""
        return tuple(
            action.units
            for actions in self.actions.values()
            for action in actions
            if action.kind is ActionKind.RECOMPUTE
        )

    @property
    def updated_in_backward(self) -> frozenset[str]:
        """Units that are updated before the optimizer step."""
        return frozenset(
            action.unit
            for boundary, actions in self.actions.items()
            for action in actions
            if action.kind is ActionKind.UPDATE and boundary.point is Point.AFTER_BACKWARD
        )


def write_schedule(plan: Plan, units: Sequence[Unit]) -> Schedule:
    """The schedule that a plan asks of a model with these units, in order of execution.

    - Stage 0: all_reduce the unit's gradient after its backward, under the backward of the units that follow:
      the buffer is there anyway, so this costs no memory.
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
    - A unit of stage 3 begins with gathering the next `plan.gather_depth` ones of stage 3, in order of
      execution, that are not there yet.
    - With `plan.update_in_backward` units of stage 2 and 3 are updated after their reduction, the others where they
      are without it. So is a unit whose parameters modules of other units use: what runs later in the backward may
      need their values. Stages 0 and 1 keep whole gradients because a script may read them.

    A unit without trainable parameters has nothing to reduce or update.
    """
    if plan.executor == "fsdp2":
        return _schedule_of_groups(plan, units)
    chosen = resolve_units(plan, units)
    trainable = {unit.name for unit in units if unit.trainable_bytes > 0}
    shared = {unit.name for unit in units if unit.is_shared}
    actions: dict[Boundary, list[Action]] = {}

    def add(
        point: Point,
        boundary_unit: str,
        kind: ActionKind,
        unit: str,
        *,
        shard: bool = False,
        overlaps: bool = False,
        ranks: Ranks = Ranks.ALL,
        units: tuple[str, ...] = (),
    ) -> None:
        lane = Lane.COLLECTIVE if kind in (ActionKind.GATHER, ActionKind.REDUCE) else Lane.COMPUTE
        if kind is ActionKind.GATHER or shard:
            ranks = Ranks.INSIDE
        action = Action(
            kind=kind, unit=unit, lane=lane, shard=shard, overlaps=overlaps, ranks=ranks, units=units
        )
        actions.setdefault(Boundary(point, boundary_unit), []).append(action)

    following, preceding = _neighbours(plan, chosen)

    for unit in chosen:
        name, stage = unit.name, unit.zero_stage if plan.num_ranks > 1 else 0
        if stage == 3:
            for before, after, ahead in (
                (Point.BEFORE_FORWARD, Point.AFTER_FORWARD, following[name]),
                (Point.BEFORE_BACKWARD, Point.AFTER_BACKWARD, preceding[name]),
            ):
                add(before, name, ActionKind.GATHER, name)
                for other in ahead:
                    add(before, name, ActionKind.GATHER, other, overlaps=True)
                if after is Point.AFTER_BACKWARD or (unit.reshard and name not in shared):
                    add(after, name, ActionKind.RELEASE, name)
        for stretch in plan.unit_stretches:
            if stretch[0] == name:
                add(Point.BEFORE_FORWARD, name, ActionKind.RECOMPUTE, name, units=stretch)
        if unit.recompute:
            add(Point.BEFORE_FORWARD, name, ActionKind.RECOMPUTE, name, units=(name,))
        if name in trainable:
            if plan.num_ranks > 1:
                overlaps = stage < 2 or plan.overlap
                add(Point.AFTER_BACKWARD, name, ActionKind.REDUCE, name, shard=stage >= 2, overlaps=overlaps)
                if stage >= 2 and plan.group_ranks < plan.num_ranks:
                    across = Ranks.ACROSS
                    add(Point.AFTER_BACKWARD, name, ActionKind.REDUCE, name, overlaps=overlaps, ranks=across)
            if plan.update_in_backward and stage >= 2 and name not in shared:
                add(Point.AFTER_BACKWARD, name, ActionKind.UPDATE, name, overlaps=plan.overlap)
            else:
                add(Point.BEFORE_OPTIMIZER, "", ActionKind.UPDATE, name)
            if stage in (1, 2):
                add(Point.AFTER_OPTIMIZER, "", ActionKind.GATHER, name, overlaps=plan.overlap)
                if plan.overlap:
                    add(Point.BEFORE_FORWARD, name, ActionKind.GATHER, name)
    return Schedule(
        num_ranks=plan.num_ranks,
        shard_ranks=plan.group_ranks,
        units=chosen,
        actions={boundary: tuple(items) for boundary, items in actions.items()},
        precision=plan.precision,
        compression=plan.compression,
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """What FSDP2 gathers together, and the first and last unit that run while it is there. `name` is its module's."""

    name: str
    first: str
    last: str
    is_whole: bool
    reshards: bool
    is_trainable: bool


def _groups(chosen: Sequence[UnitPlan], units: Sequence[Unit]) -> list[_Group]:
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
                reshards=not is_whole and all(reshards[unit.name] for unit in own),
                is_trainable=any(unit.trainable_bytes for unit in own),
            )
        )
    return sorted(found, key=lambda group: (not group.is_whole, names.index(group.first), len(group.name)))


def _schedule_of_groups(plan: Plan, units: Sequence[Unit]) -> Schedule:
    """What FSDP2 does of a plan, in a script that has called `fully_shard`; actions name groups by their modules.

    A group is gathered before its module's forward and before its backward, unless it is there, freed after the
    backward, and with `reshard` after the forward too; what no group inside the model has stays from the model's
    forward to the end of the backward. Gradients are reduced after the group's backward. A group begins with
    gathering the next `plan.gather_depth` ones.
    """
    chosen = resolve_units(plan, units)
    groups = _groups(chosen, units)
    inner = [group for group in groups if not group.is_whole]
    actions: dict[Boundary, list[Action]] = {}

    def add(point: Point, unit: str, kind: ActionKind, group: str, *, overlaps: bool = False) -> None:
        is_collective = kind in (ActionKind.GATHER, ActionKind.REDUCE)
        action = Action(
            kind=kind,
            unit=group,
            lane=Lane.COLLECTIVE if is_collective else Lane.COMPUTE,
            shard=kind is ActionKind.REDUCE,
            overlaps=overlaps,
            ranks=Ranks.INSIDE if is_collective else Ranks.ALL,
        )
        actions.setdefault(Boundary(point, unit), []).append(action)

    def gather(point: Point, unit: str, group: _Group | None, ahead: Sequence[_Group]) -> None:
        if group is not None:
            add(point, unit, ActionKind.GATHER, group.name)
        for other in ahead[: plan.gather_depth]:
            add(point, unit, ActionKind.GATHER, other.name, overlaps=True)

    whole = next((group for group in groups if group.is_whole), None)
    gather(Point.FORWARD_BEGINS, "", whole, inner)
    for place, group in enumerate(inner):
        gather(Point.BEFORE_FORWARD, group.first, group, inner[place + 1 :])
        if group.reshards:
            add(Point.AFTER_FORWARD, group.last, ActionKind.RELEASE, group.name)
    gather(Point.BACKWARD_BEGINS, "", None, inner[::-1])
    for place, group in reversed(list(enumerate(inner))):
        gather(Point.BEFORE_BACKWARD, group.last, group, inner[:place][::-1])
    for group in [*inner[::-1], *([whole] if whole else [])]:
        at = (Point.BACKWARD_ENDS, "") if group.is_whole else (Point.AFTER_BACKWARD, group.first)
        add(*at, ActionKind.RELEASE, group.name)
        if group.is_trainable:
            add(*at, ActionKind.REDUCE, group.name, overlaps=plan.overlap)
            add(Point.BEFORE_OPTIMIZER, "", ActionKind.UPDATE, group.name)
    for unit in chosen:
        if unit.recompute:
            add(Point.BEFORE_FORWARD, unit.name, ActionKind.RECOMPUTE, unit.name)
    return Schedule(
        num_ranks=plan.num_ranks,
        shard_ranks=plan.group_ranks,
        units=chosen,
        actions={boundary: tuple(items) for boundary, items in actions.items()},
        executor=plan.executor,
        algorithms=plan.algorithms,
    )


def updated_at_step(schedule: Schedule) -> Schedule:
    """The same, with all units updated in the optimizer step: what is played until it is known that sooner is right."""
    early = [unit.name for unit in schedule.units if unit.name in schedule.updated_in_backward]
    actions = {
        boundary: tuple(
            action
            for action in found
            if not (action.kind is ActionKind.UPDATE and boundary.point is Point.AFTER_BACKWARD)
        )
        for boundary, found in schedule.actions.items()
    }
    late = tuple(Action(kind=ActionKind.UPDATE, unit=name, lane=Lane.COMPUTE) for name in early)
    at_step = Boundary(Point.BEFORE_OPTIMIZER, "")
    return replace(schedule, actions={**actions, at_step: (*actions.get(at_step, ()), *late)})


def _neighbours(plan: Plan, chosen: Sequence[UnitPlan]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """For each unit of stage 3 those to gather ahead in the forward, and in the backward, nearest first.

    The order is the plan's, which is that of execution, where it names all of them.
    """
    order = {unit.name: position for position, unit in enumerate(plan.units)}
    sharded = [unit.name for unit in chosen if unit.zero_stage == 3 and plan.num_ranks > 1]
    if all(name in order for name in sharded):
        sharded.sort(key=lambda name: order[name])
    depth, backwards = plan.gather_depth, sharded[::-1]
    return (
        {name: sharded[place + 1 : place + 1 + depth] for place, name in enumerate(sharded)},
        {name: backwards[place + 1 : place + 1 + depth] for place, name in enumerate(backwards)},
    )


def resolve_units(plan: Plan, units: Sequence[Unit]) -> tuple[UnitPlan, ...]:
    """The plan's word on each of `units`: its own entry, else its `zero_stage` and `policy`.

    `every-layer` recomputes every block; `sqrt` leaves every round(sqrt(n))-th of n blocks as it is, so that
    about sqrt(n) stretches are recomputed (arXiv:1604.06174). A block is one of several units of one class
    that stand side by side in the model.
    """
    given = {unit.name: unit for unit in plan.units}
    recomputed = _recomputed_by_policy(plan.policy, blocks_of(units))
    return tuple(
        given.get(
            unit.name,
            UnitPlan(name=unit.name, zero_stage=plan.zero_stage, recompute=unit.name in recomputed),
        )
        for unit in units
    )


def blocks_of(units: Sequence[Unit]) -> tuple[str, ...]:
    """Names of the units that are blocks: two or more of one class under one parent, holding modules."""
    kinds = [(unit.name.rpartition(".")[0], unit.type_name) for unit in units]
    return tuple(
        unit.name for unit, kind in zip(units, kinds, strict=True) if unit.is_block and kinds.count(kind) > 1
    )


def _recomputed_by_policy(policy: str, blocks: Sequence[str]) -> frozenset[str]:
    if policy == "every-layer":
        return frozenset(blocks)
    if policy == "sqrt" and blocks:
        stride = max(2, round(math.sqrt(len(blocks))))
        return frozenset(name for position, name in enumerate(blocks, start=1) if position % stride)
    return frozenset()
