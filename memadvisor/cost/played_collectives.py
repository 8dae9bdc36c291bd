"""The time of a schedule's collectives: when they are queued, what waits for them, and which are left out."""

from __future__ import annotations

from collections import Counter

from memadvisor.cost.collectives import CollectiveTimes, ring_bytes
from memadvisor.cost.engine_time import EngineTime
from memadvisor.cost.lanes import NO_COLLECTIVE, Lanes
from memadvisor.cost.messages import Message
from memadvisor.cost.step import CapturedStep
from memadvisor.executors import algorithm_for
from memadvisor.schedule import Action, ActionKind, Ranks, Schedule


class PlayedCollectives:
    """`own`: what the engine itself takes. `arriving`: units gathered ahead, and by which collective. `sent_bytes`: by this
    rank, so far."""

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        times: CollectiveTimes | None,
        lanes: Lanes,
        own: EngineTime,
    ) -> None:
        self._schedule = schedule
        self._times = times
        self._lanes = lanes
        self._own = own
        # Whose gradients the script lets be reduced, though others follow; with one alone, it is the last of the step.
        self._synced = step.synced_micro_batches if len(step.synced_micro_batches) > 1 else frozenset[int]()
        self.arriving: dict[str, int] = {}
        self.sent_bytes = 0.0
        self._reductions: dict[str, int] = {}  # each unit's last one
        self._num_left_out: Counter[str] = Counter()  # by local SGD, by unit

    def queue(self, action: Action, message: Message) -> None:
        """What an action sends."""
        if self._times is None:
            raise AssertionError("several ranks need times of collectives")
        if not message.size_bytes:
            return  # what came before is put where it belongs
        schedule, num_ranks = self._schedule, self._schedule.size_of(action.ranks)
        often = self._times_a_step(action)
        algorithm = algorithm_for(schedule.algorithms, message.operation, message.size_bytes, num_ranks)
        duration_s = often * self._times.seconds(message.operation, message.size_bytes, num_ranks, algorithm)
        self.sent_bytes += often * ring_bytes(message.operation, message.size_bytes, num_ranks)
        if engine_s := self._own.action_s(action):
            self._lanes.compute(f"engine at the {action.kind.value} of {action.unit}", engine_s)
        # torch's own threads sum what stays whole (Wire.begin_mean), and the lane's does the rest.
        follows = message.operation != "all_reduce"
        number = self._lanes.collective(f"{action.kind.value} {action.unit}", duration_s, follows=follows)
        if not action.overlaps:
            self._lanes.wait_for(number)
        elif action.kind is ActionKind.GATHER:
            self.arriving[action.unit] = number
        else:
            self._reductions[action.unit] = number

    def _times_a_step(self, action: Action) -> float:
        """How often what an action sends goes in one step."""
        if self._schedule.local_sgd is None or action.kind is not ActionKind.AVERAGE:
            return 1.0
        return self._num_left_out[action.unit] / self._schedule.local_sgd.period

    def wait_for_gathered(self, action: Action) -> None:
        """A unit that was gathered ahead is waited for where it is gathered next."""
        if not action.overlaps and action.unit in self.arriving:
            self._lanes.wait_for(self.arriving.pop(action.unit))

    def wait_for_reduction_of(self, unit: str | None) -> None:
        """For the last one of a unit, and so for what was sent before; None: for nothing."""
        if unit is not None:
            self._lanes.wait_for(self._reductions.get(unit, NO_COLLECTIVE))

    def wait_for_reductions(self) -> None:
        """For all."""
        self._lanes.wait_for(max(self._reductions.values(), default=NO_COLLECTIVE))

    def leaves_out(self, action: Action, micro_batch: int | None, *, is_last: bool) -> bool:
        """Whether a reduction is not done here: with accumulation under no_sync, what all ranks keep whole is summed once;
        and local SGD does most steps without."""
        leaves_shards = action.shard or action.ranks is Ranks.ACROSS
        if not (leaves_shards or is_last or micro_batch in self._synced):
            return True
        if self._schedule.local_sgd is None:
            return False
        self._num_left_out[action.unit] += 1
        return True
