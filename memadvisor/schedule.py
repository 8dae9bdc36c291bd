"""The schedule: which action happens at which boundary of a step.

The simulator (memadvisor/cost/simulate.py) plays it against measured costs, the executor
(memadvisor/engines/sharding/executor.py) plays the very same object on the live model. What a ZeRO stage or a
checkpoint *means* is therefore written once, as actions: write_schedule.py, and for FSDP2 write_fsdp2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from memadvisor.compression import UNCOMPRESSED, Compression
from memadvisor.executors import Algorithm, all_native
from memadvisor.local_sgd import LocalSgd
from memadvisor.plan import Plan, UnitPlan
from memadvisor.precision import FULL_PRECISION, Precision


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
    before the backward of the last one). update: step the optimizer on what this rank holds; after a
    backward that is the last one of a step, and frees the gradient shard. prefetch: bring what lies on the lane's
    tier into memory; before the optimizer that is the unit's optimizer state, before its backward what autograd keeps
    of it. offload: write it there, and free it. A gather on the lane of a tier reads parameters that lie there, and a
    reduce on it puts the gradient there; the prefetch and the offload around such a unit's update take both along with
    the state. Both, of optimizer state and on the compute lane: decode and code it. average: replace its parameters by
    their mean over the ranks.
    """

    GATHER = "gather"
    RELEASE = "release"
    REDUCE = "reduce"
    RECOMPUTE = "recompute"
    UPDATE = "update"
    PREFETCH = "prefetch"
    OFFLOAD = "offload"
    AVERAGE = "average"


class Lane(StrEnum):
    """What an action occupies; lanes run at the same time, actions of one lane one after another.

    host, disk: transfers between the memory that computes and these.
    """

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    HOST = "host"
    DISK = "disk"


class Ranks(StrEnum):
    """Who takes part in a collective.

    inside: the ranks that share what is sharded, all ranks without hybrid sharding. across: those that hold the
    same shard, one of each group. secondary: those that share a second copy of what is sharded.
    """

    ALL = "all"
    INSIDE = "inside"
    ACROSS = "across"
    SECONDARY = "secondary"


class Boundary(NamedTuple):
    point: Point
    unit: str  # "" with BEFORE_OPTIMIZER and AFTER_OPTIMIZER, and around the whole model


# A simulation asks for each a few times, and a search plays hundreds: there is one of each.
_boundary = lru_cache(maxsize=1 << 14)(Boundary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """`shard` matters to `reduce` alone: True leaves each rank its shard of the sum and frees the rest.

    ranks: of a collective. A reduction across is of the shards that the reduction inside, just before it, leaves. A
    release by `secondary` leaves this rank's part of the second copy, and a gather by them takes and frees it;
    one that overlaps is left out where it has been taken.
    overlaps: compute goes on meanwhile. What waits is, for a gather, the next gather of the same unit that
    does not overlap; for a reduce to shards, a later reduce, where the schedule's `reduce_depth` units' are under way;
    for every reduce, the backward's end. Of what the optimizer step updates, a gather that overlaps goes on in the next step.
    Without it compute waits where the action stands. An update never runs beside
    compute: one that overlaps follows a reduce that does, and is put off until that is over: behind a later reduce, which
    then runs under it, or at the backward's end. A prefetch before the optimizer is waited for by the unit's update, an offload by the next
    offload (its bytes are free then), and the last one at the step's end. Prefetches take turns with two buffers: each
    begins when the offload of the unit before the last is over. An offload of what autograd keeps is waited for, and
    its bytes are free then, by the offload of the same unit that does not overlap; a prefetch of it by the unit's
    backward, tensor by tensor.
    units: of a recompute, all units that run without saving, and again as one, in order of execution; the boundary is
    the first one's. Of two at one boundary the first holds the second, and what is held runs again by itself. Of a reduce
    that goes in one message with others: all of these, which stand at their own boundaries and have the same `units`; the
    message goes with the last one that is played.
    kept: of a recompute of one unit, operators whose outputs stay (plan.UnitPlan).
    """

    kind: ActionKind
    unit: str
    lane: Lane
    shard: bool = False
    overlaps: bool = False
    ranks: Ranks = Ranks.ALL
    units: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions by boundary. `units` are in order of execution; `shard_ranks` of `num_ranks` share each sharded unit.

    With gradient accumulation, a `reduce` with `shard` happens in every micro-batch (its memory is the point),
    one without `shard` in those that the script lets DDP synchronise. `reduce_depth`: how many units' reductions to shards
    that overlap may be under way at once. `precision`: in what dtype gathers make
    parameters present, and reductions to shards sum. `compression`: what their messages hold. `executor`,
    `algorithms`, `secondary_ranks`, `delayed_update` and `update_by_unit` are the plan's: with the first of the last two, what
    stands before the optimizer step is done beside the next forward and backward; with the other its updates are done one
    after another, and not all at once. `local_sgd`: which steps play the reductions, and after which the
    averages are played; None: all do, and none.
    """

    num_ranks: int
    shard_ranks: int
    units: tuple[UnitPlan, ...]
    actions: dict[Boundary, tuple[Action, ...]]
    precision: Precision = FULL_PRECISION
    compression: Compression = UNCOMPRESSED
    executor: str = "built-in"
    algorithms: tuple[Algorithm, ...] = ()
    secondary_ranks: int | None = None
    delayed_update: bool = False
    update_by_unit: bool = False
    local_sgd: LocalSgd | None = None
    reduce_depth: int = 1

    def size_of(self, ranks: Ranks) -> int:
        """How many ranks take part."""
        if ranks is Ranks.ALL:
            return self.num_ranks
        if ranks is Ranks.ACROSS:
            return self.num_ranks // self.shard_ranks
        return (self.secondary_ranks or self.shard_ranks) if ranks is Ranks.SECONDARY else self.shard_ranks

    @property
    def is_native(self) -> bool:
        """Whether all gathers and reductions to shards are left to the backend."""
        return all_native(self.algorithms)

    def at(self, point: Point, unit: str = "") -> tuple[Action, ...]:
        return self.actions.get(_boundary(point, unit), ())

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
    def offloaded_states(self) -> dict[str, Lane]:
        """Units whose optimizer state lies elsewhere between updates, or is coded, and the lane that brings it, in their
        order."""
        return {
            action.unit: action.lane
            for action in self.at(Point.BEFORE_OPTIMIZER)
            if action.kind is ActionKind.OFFLOAD
        }

    @property
    def updated_alone(self) -> tuple[str, ...]:
        """Units that the optimizer step updates by themselves, from where their state always lies, in their order."""
        if not self.update_by_unit:
            return ()
        updated = (a.unit for a in self.at(Point.BEFORE_OPTIMIZER) if a.kind is ActionKind.UPDATE)
        return tuple(unit for unit in updated if unit not in self.offloaded_states)

    @property
    def gathered_behind_updates(self) -> frozenset[str]:
        """Units whose updated parameters begin to be gathered while the optimizer step updates others."""
        return frozenset(a.unit for a in self.at(Point.BEFORE_OPTIMIZER) if a.kind is ActionKind.GATHER)

    @property
    def gathers_of_updated(self) -> tuple[Action, ...]:
        """Those that bring what an optimizer step has updated to all ranks, in their order; of stage 3 what the next forward
        begins with."""
        actions = (*self.at(Point.BEFORE_OPTIMIZER), *self.at(Point.AFTER_OPTIMIZER))
        return tuple(action for action in actions if action.kind is ActionKind.GATHER)

    @property
    def paged(self) -> dict[str, Lane]:
        """Units whose parameters and gradients lie on the tier of a lane between their uses."""
        return {u.name: Lane(u.parameter_tier) for u in self.units if u.parameter_tier != "device"}

    @property
    def activation_bits(self) -> dict[str, int]:
        """What activations of units are rounded to, by unit that does so."""
        return {unit.name: unit.activation_bits for unit in self.units if unit.activation_bits is not None}

    @property
    def parts(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Modules inside a unit that run again before their own backward, by unit that has such parts."""
        return {unit.name: unit.parts for unit in self.units if unit.parts}

    @property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """Operators whose outputs stay, by recomputed unit."""
        return {
            action.unit: action.kept
            for actions in self.actions.values()
            for action in actions
            if action.kind is ActionKind.RECOMPUTE and action.kept
        }

    @property
    def kept_calls(self) -> dict[str, tuple[int, ...]]:
        """Calls that do not run again, by recomputed unit that has others which do."""
        return {unit.name: unit.kept_calls for unit in self.units if unit.recompute and unit.kept_calls}

    @property
    def updated_in_backward(self) -> frozenset[str]:
        """Units that are updated before the optimizer step."""
        return frozenset(
            action.unit
            for boundary, actions in self.actions.items()
            for action in actions
            if action.kind is ActionKind.UPDATE and boundary.point is Point.AFTER_BACKWARD
        )


# A search writes thousands of schedules, of actions that are alike: there is one of each.
_action = lru_cache(maxsize=1 << 14)(Action)


class ScheduleBuilder:
    """Actions as they are added, boundary by boundary."""

    def __init__(self) -> None:
        self._actions: dict[Boundary, list[Action]] = {}

    def gather(
        self,
        point: Point,
        unit: str,
        gathered: str,
        *,
        overlaps: bool = False,
        lane: Lane = Lane.COLLECTIVE,
        ranks: Ranks = Ranks.INSIDE,
    ) -> None:
        action = _action(kind=ActionKind.GATHER, unit=gathered, lane=lane, overlaps=overlaps, ranks=ranks)
        self._add(point, unit, action)

    def release(self, point: Point, unit: str, released: str, *, ranks: Ranks = Ranks.ALL) -> None:
        action = _action(kind=ActionKind.RELEASE, unit=released, lane=Lane.COMPUTE, ranks=ranks)
        self._add(point, unit, action)

    def reduce(
        self,
        point: Point,
        unit: str,
        reduced: str,
        *,
        ranks: Ranks,
        overlaps: bool,
        lane: Lane = Lane.COLLECTIVE,
        merged: tuple[str, ...] = (),
    ) -> None:
        """Inside a group of ranks to shards, among all or across groups to the whole; then with those of `merged`."""
        action = _action(
            kind=ActionKind.REDUCE,
            unit=reduced,
            lane=lane,
            shard=ranks is Ranks.INSIDE,
            overlaps=overlaps,
            ranks=ranks,
            units=merged,
        )
        self._add(point, unit, action)

    def recompute(self, units: tuple[str, ...], kept: tuple[str, ...] = ()) -> None:
        """Run again what begins with the first of `units` and ends with the last."""
        action = _action(kind=ActionKind.RECOMPUTE, unit=units[0], lane=Lane.COMPUTE, units=units, kept=kept)
        self._add(Point.BEFORE_FORWARD, units[0], action)

    def update(self, unit: str) -> None:
        self._add(Point.BEFORE_OPTIMIZER, "", _action(kind=ActionKind.UPDATE, unit=unit, lane=Lane.COMPUTE))

    def update_offloaded(self, units: Sequence[tuple[str, Lane]]) -> None:
        """Update units whose optimizer state lies on the tier of a lane, each under the next one's prefetch."""
        for place, (unit, lane) in enumerate(units):
            if place == 0:
                self._transfer(ActionKind.PREFETCH, unit, lane, overlaps=False)
            if place + 1 < len(units):
                self._transfer(ActionKind.PREFETCH, *units[place + 1], overlaps=True)
            self.update(unit)
            self._transfer(ActionKind.OFFLOAD, unit, lane, overlaps=True)

    def update_coded(self, units: Sequence[str]) -> None:
        """Update units whose optimizer state is in codes, each decoded before its update and coded after it."""
        for unit in units:
            self._transfer(ActionKind.PREFETCH, unit, Lane.COMPUTE, overlaps=False)
            self.update(unit)
            self._transfer(ActionKind.OFFLOAD, unit, Lane.COMPUTE, overlaps=False)

    def _transfer(self, kind: ActionKind, unit: str, lane: Lane, *, overlaps: bool) -> None:
        self._add(Point.BEFORE_OPTIMIZER, "", _action(kind=kind, unit=unit, lane=lane, overlaps=overlaps))

    def offload(self, point: Point, at: str, unit: str, lane: Lane, *, overlaps: bool) -> None:
        self._add(point, at, _action(kind=ActionKind.OFFLOAD, unit=unit, lane=lane, overlaps=overlaps))

    def prefetch(self, point: Point, at: str, unit: str, lane: Lane, *, overlaps: bool) -> None:
        self._add(point, at, _action(kind=ActionKind.PREFETCH, unit=unit, lane=lane, overlaps=overlaps))

    def average(self, unit: str) -> None:
        action = _action(kind=ActionKind.AVERAGE, unit=unit, lane=Lane.COLLECTIVE)
        self._add(Point.AFTER_OPTIMIZER, "", action)

    def update_early(self, unit: str, *, overlaps: bool) -> None:
        action = _action(kind=ActionKind.UPDATE, unit=unit, lane=Lane.COMPUTE, overlaps=overlaps)
        self._add(Point.AFTER_BACKWARD, unit, action)

    def _add(self, point: Point, unit: str, action: Action) -> None:
        self._actions.setdefault(_boundary(point, unit), []).append(action)

    def schedule(self, plan: Plan, units: tuple[UnitPlan, ...]) -> Schedule:
        """What has been added, for a plan whose word on each unit is `units`."""
        return Schedule(
            num_ranks=plan.num_ranks,
            shard_ranks=plan.group_ranks,
            units=units,
            actions={boundary: tuple(items) for boundary, items in self._actions.items()},
            precision=plan.precision,
            compression=plan.compression,
            executor=plan.executor,
            algorithms=plan.algorithms,
            secondary_ranks=plan.secondary_ranks,
            delayed_update=plan.delayed_update,
            update_by_unit=plan.update_by_unit,
            reduce_depth=plan.reduce_depth,
            local_sgd=plan.local_sgd,
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
