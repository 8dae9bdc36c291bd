"""Optimizer state of a script's own FSDP2 that lies on another tier between updates, or in codes.

Each rank has the state of its shards, tensor by tensor as it was captured (memadvisor/engines/updates/paged_step.py): what
is put away of a unit is packed into one parcel, and is in one of two buffers while the optimizer steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from memadvisor.coded_states import TABLES_BYTES, coded_bytes, scratch_bytes
from memadvisor.cost.paged_updates import PARCEL_ALIGNMENT_BYTES, FetchedStates
from memadvisor.cost.states import ShardState
from memadvisor.cost.step import CapturedStep
from memadvisor.schedule import Lane, Schedule


class FetchedShards:
    """By unit what is fetched, or expanded, for its update; and what is left of it at rest."""

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self._device = step.device
        self.away = schedule.offloaded_states
        self._moved: dict[str, list[ShardState]] = {}
        for name, lane in self.away.items():
            states = step.states.get(name)
            items = [item for own in states.shard_items.values() for item in own] if states else []
            self._moved[name] = [item for item in items if item.is_coded or lane is not Lane.COMPUTE]
        # What a GPU's allocator gave with what is not there any more.
        self.given_bytes = sum(step.states[n].given_optimizer_bytes for n in self.away if n in step.states)
        self._coded = [name for name, lane in self.away.items() if lane is Lane.COMPUTE]
        self._fetched = FetchedStates(self.away, {name: self.state_bytes(name) for name in self.away}, {})

    @property
    def table_bytes(self) -> int:
        """What codes are looked up in."""
        return TABLES_BYTES if self._coded else 0

    def resting(self, captured_sizes: Sequence[int]) -> list[int]:
        """Sizes of what is there at rest, for the state that was captured: without what is away, and with codes.

        An allocator may have given a tensor more than it is: then the smallest that it fits in was its.
        """
        left = sorted(captured_sizes)
        for item in sorted((i for own in self._moved.values() for i in own), key=lambda i: -i.size_bytes):
            place = bisect_left(left, item.size_bytes)
            if place < len(left):
                del left[place]
        return left + [coded_bytes(item.num_elements) for name in self._coded for item in self._moved[name]]

    def state_bytes(self, name: str) -> int:
        """What is fetched of a unit for its update, or expanded."""
        return _packed_bytes(item.size_bytes for item in self._moved.get(name, ()))

    def coding_bytes(self, name: str) -> int:
        """Beside that, while it is coded or decoded."""
        counts = [item.num_elements for item in self._moved[name]] if name in self._coded else []
        return scratch_bytes(max(counts), self._device) if counts else 0

    def turn(self, *, steps: bool) -> None:
        """The optimizer begins to step, or has ended."""
        self._fetched.is_there = steps

    def buffers(self) -> dict[int, int]:
        """Bytes of each of the buffers that are there now, by place."""
        items = self._fetched.items().items()
        return {place: size for (what, place), size in items if what == "optimizer_state" and size}


def captured_sizes(step: CapturedStep, category: str) -> list[int]:
    """Sizes of the captured storages of a category that are there from step to step."""
    return [
        item.size_bytes
        for item in step.storages
        if item.category == category and item.birth_segment < 0 and item.death_segment >= len(step.segments)
    ]


def _packed_bytes(sizes: Iterable[int]) -> int:
    end = start = 0
    for size_bytes in sizes:
        end = start + size_bytes
        start = -(-end // PARCEL_ALIGNMENT_BYTES) * PARCEL_ALIGNMENT_BYTES
    return end
