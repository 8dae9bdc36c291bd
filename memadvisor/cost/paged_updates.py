"""The time of updates whose optimizer state lies on another tier, as memadvisor/engines/paged_step.py does them.

Two buffers take turns. A unit's state is read into its buffer when what was in that is written; the unit is updated
when the state is there; and compute waits for the write of the unit before the one that has just been updated.
State in codes has a buffer of its own alone, and is decoded and coded by what computes, before and after its update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memadvisor.cost.lanes import Lanes
from memadvisor.cost.transfers import TransferTimes
from memadvisor.schedule import Action, ActionKind, Lane, Schedule


class FetchedStates:
    """The two buffers that fetched states take turns in, and that of those in codes, while the optimizer steps."""

    def __init__(self, lanes: Mapping[str, Lane], state_bytes: Callable[[str], int]) -> None:
        coded = [name for name, lane in lanes.items() if lane is Lane.COMPUTE]
        others = [name for name in lanes if name not in coded]
        self._buffers = (others[0::2], others[1::2], coded)
        self._state_bytes = state_bytes
        self.is_there = False

    def items(self) -> dict[int, int]:
        """Bytes of each buffer."""
        return {
            place: max(map(self._state_bytes, names), default=0) if self.is_there else 0
            for place, names in enumerate(self._buffers)
        }


class PagedUpdates:
    """`state_bytes`: what is fetched for a unit. `update_s`: the time of its update."""

    def __init__(
        self,
        schedule: Schedule,
        lanes: Lanes,
        times: TransferTimes | None,
        state_bytes: Callable[[str], int],
        update_s: Callable[[str], float],
    ) -> None:
        self._order = schedule.offloaded_states
        if self._order and (times is None or not set(self._order.values()) <= times.bandwidths.keys()):
            raise AssertionError("transfers need bandwidths")
        self._times = times
        self._lanes = lanes
        self._state_bytes = state_bytes
        self._update_s = update_s
        self._sides = {unit: place % 2 for place, unit in enumerate(self._order)}
        self._arriving_s: dict[str, float] = {}
        self._written_s = {0: 0.0, 1: 0.0}  # when what each buffer held is on the tier

    def __contains__(self, unit: str) -> bool:
        return unit in self._order

    def play(self, action: Action) -> None:
        """One of the actions before the optimizer step on a unit that is fetched."""
        if self._times is None:
            raise AssertionError("transfers need bandwidths")
        unit, lanes = action.unit, self._lanes
        label, side, size_bytes = f"{action.kind} of {unit}", self._sides[unit], self._state_bytes(unit)
        if action.lane is Lane.COMPUTE and action.kind is not ActionKind.UPDATE:
            seconds = self._times.read_s if action.kind is ActionKind.PREFETCH else self._times.write_s
            lanes.compute(label, seconds(action.lane, size_bytes))
        elif action.kind is ActionKind.PREFETCH:
            read_s = self._times.read_s(action.lane, size_bytes)
            self._arriving_s[unit] = lanes.transfer(action.lane, label, read_s, self._written_s[side])
        elif action.kind is ActionKind.UPDATE:
            lanes.wait_for_transfer(self._arriving_s.pop(unit, 0.0))
            lanes.compute(label, self._update_s(unit))
        elif action.kind is ActionKind.OFFLOAD:
            write_s = self._times.write_s(action.lane, size_bytes)
            self._written_s[side] = lanes.transfer(action.lane, label, write_s)
            lanes.wait_for_transfer(self._written_s[1 - side])

    def end(self) -> None:
        """The last one is written, and the buffers are free."""
        lanes = self._lanes
        for written_s in self._written_s.values():
            lanes.wait_for_transfer(written_s)
        self._written_s = {0: 0.0, 1: 0.0}
