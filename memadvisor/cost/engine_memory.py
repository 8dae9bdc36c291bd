"""What the built-in engine holds of parameters, gradients and optimizer state at each moment of a step.

This file mirrors memadvisor/engines and nothing else does: where the engine changes what it keeps, this
changes with it, and tests/engines compares the two. Our engine replaces DDP, so its buckets are not here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memadvisor.cost.activations import Activations
from memadvisor.cost.step import CapturedStep, Segment, UnitStates
from memadvisor.schedule import Action, ActionKind, Point, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an action asks of the lanes, and the bytes that live only while it runs.

    `waits`: the compute lane stands still until it is done. `operation` None: no message is sent.
    """

    operation: str | None
    size_bytes: int
    waits: bool
    staging: dict[str, int]
    count: int = 1


# A module of a model that was not discovered as such: it runs, but nothing of it is planned.
_NO_PARAMETERS = UnitStates(name="", parameters=(), optimizer_bytes=0, optimizer_scalar_bytes=0)


class EngineMemory:
    """The states of one rank while a schedule is played, by category."""

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self.step = step
        self.num_ranks = schedule.num_ranks
        self.stages = {unit.name: unit.zero_stage if schedule.num_ranks > 1 else 0 for unit in schedule.units}
        # One rank, as captured: nothing of ours touches the states, so they are replayed.
        self.replays = schedule.num_ranks == 1 and step.world_size == 1 and step.repeats == 1
        self.view = "captured" if self.replays else "own_gradients"
        self.parameters = Counter({name: self._resting_parameters(name) for name in self.stages})
        self.gradients: Counter[str] = Counter()
        if _gradients_outlive_step(step):
            for name in self.stages:
                self.gradients[name] = self._resting_gradients(name)

    def held(self) -> Counter[str]:
        """Bytes of states alive now, beyond what the replayed segments hold themselves."""
        if self.replays:
            return Counter()
        held = Counter(self.step.constant_state_bytes)
        held["parameter"] += self.parameters.total()
        held["gradient"] += self.gradients.total()
        held["optimizer_state"] += sum(self._optimizer_bytes(name) for name in self.stages)
        return held

    def enter(self, segment: Segment, *, is_later: bool) -> None:
        """Gradients of the step before are gone as soon as the captured ones were."""
        if segment.phase == "outside" and not segment.captured.start.get("gradient"):
            self.gradients.clear()

    def leave(self, segment: Segment) -> None:
        """After its backward a unit has all of its gradients."""
        if segment.phase == "backward" and segment.unit is not None:
            self.gradients[segment.unit] = self._states(segment.unit).trainable_bytes

    def act(self, action: Action, point: Point) -> Work | None:
        """Do an action's change of memory, and say what it costs."""
        states = self._states(action.unit)
        if action.kind is ActionKind.GATHER:
            self.parameters[action.unit] = states.parameter_bytes
            return Work(operation="all_gather", size_bytes=states.parameter_bytes, waits=True, staging={})
        if action.kind is ActionKind.RELEASE:
            self.parameters[action.unit] = self._resting_parameters(action.unit)
            return None
        if action.kind is ActionKind.REDUCE:
            size_bytes = states.trainable_bytes
            if action.shard:
                shard = shard_bytes(states, self.num_ranks, trainable=True)
                self.gradients[action.unit] = shard
                staging = {"communication": size_bytes - shard}
                return Work(operation="reduce_scatter", size_bytes=size_bytes, waits=True, staging=staging)
            return Work(operation="all_reduce", size_bytes=size_bytes, waits=True, staging={})
        return None

    def scaled_peak(self, segment: Segment, activations: Activations, position: int) -> Counter[str]:
        """The segment's own highest instant; an optimizer that steps shards has temporaries of shards."""
        peak = activations.peak(position)
        if segment.phase != "optimizer" or self.replays:
            return peak
        start = activations.start(position)
        sharded = any(stage >= 1 for stage in self.stages.values())
        divisor = self.num_ranks if sharded else 1
        return start + Counter({c: -(-(peak[c] - start[c]) // divisor) for c in peak})

    def _resting_parameters(self, name: str) -> int:
        states = self._states(name)
        if self.stages[name] == 3:
            return shard_bytes(states, self.num_ranks, trainable=False)
        return states.parameter_bytes

    def _resting_gradients(self, name: str) -> int:
        states = self._states(name)
        if self.stages[name] >= 2:
            return shard_bytes(states, self.num_ranks, trainable=True)
        return states.trainable_bytes

    def _optimizer_bytes(self, name: str) -> int:
        states = self._states(name)
        if self.stages[name] >= 1:
            return -(-states.optimizer_bytes // self.num_ranks) + states.optimizer_scalar_bytes
        return states.optimizer_bytes + states.optimizer_scalar_bytes

    def _states(self, name: str) -> UnitStates:
        return self.step.states.get(name) or _NO_PARAMETERS


def shard_bytes(states: UnitStates, num_ranks: int, *, trainable: bool) -> int:
    """One rank's share of a unit, padding included: ceil(elements / ranks) for each dtype."""
    elements: Counter[str] = Counter()
    item_bytes: dict[str, int] = {}
    for parameter in states.parameters:
        if parameter.requires_grad or not trainable:
            elements[parameter.dtype] += parameter.num_elements
            item_bytes[parameter.dtype] = parameter.size_bytes // max(1, parameter.num_elements)
    return sum(-(-count // num_ranks) * item_bytes[dtype] for dtype, count in elements.items())


def _gradients_outlive_step(step: CapturedStep) -> bool:
    return bool(step.segments and step.segments[0].captured.start.get("gradient"))
