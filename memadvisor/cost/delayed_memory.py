"""What the engine holds where updates are one step late (memadvisor/engines/updates/delayed_updates.py).

- The gradients that an update is made with, and in their memory the values that it makes, from one step to the next: so
  many bytes as the units have gradients, all the time.
- The two buffers of state, and scratch for the gradients of the largest unit, from one step to the next too.
- The script has no gradients after its step.
- What the optimizer allocates beside runs in a thread of its own, some time in the step: it is counted at every moment,
  so that no peak is above what is predicted.
"""

from __future__ import annotations

from memadvisor.cost.engine_memory import EngineMemory
from memadvisor.cost.fsdp2_memory import Fsdp2Memory
from memadvisor.cost.step import CapturedStep, Segment
from memadvisor.schedule import Point, Schedule


class DelayedMemory(EngineMemory):
    """Of one rank, whose units with state elsewhere are updated late."""

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        super().__init__(step, schedule)
        own = {name: self._units.gradient_bytes[name] for name in self._units.away}
        self._late_bytes = {
            "gradient": sum(own.values()) + max(own.values(), default=0),
            "temporary": max((_temporary_bytes(step.segments[at]) for at in step.optimizer_at), default=0),
        }
        self._take()

    def held(self) -> dict[str, int]:
        held = super().held()
        for category, size_bytes in self._late_bytes.items():
            held[category] = held.get(category, 0) + size_bytes * (
                category != "temporary" or not self._is_stepping
            )
        return held

    def tensors(self) -> dict[tuple[str, str], int]:
        return {**super().tensors(), ("late gradients", ""): self._late_bytes["gradient"]}

    def enter(self, segment: Segment, *, is_again: bool = False) -> None:
        super().enter(segment, is_again=is_again)
        self._fetched.is_there = True

    def turn(self, point: Point) -> None:
        if point is Point.AFTER_OPTIMIZER:
            self._take()
        self._fetched.is_there = True

    def _take(self) -> None:
        """The script's gradients are the engine's."""
        for name in self._units.away:
            self._buffers.discard(name)


def _temporary_bytes(segment: Segment) -> int:
    level = segment.captured
    return max(0, level.peak.get("temporary", 0) - level.start.get("temporary", 0))


def memory_of(step: CapturedStep, schedule: Schedule) -> EngineMemory | Fsdp2Memory:
    """The states of who plays the schedule on the live model."""
    if schedule.executor == "fsdp2":
        return Fsdp2Memory(step, schedule)
    return DelayedMemory(step, schedule) if schedule.delayed_update else EngineMemory(step, schedule)
