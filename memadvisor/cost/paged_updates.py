"""The time of updates whose optimizer state lies on another tier, as memadvisor/engines/updates/paged_step.py does them; with
parameters and gradients, where those lie there too.

Two buffers take turns. A unit's state is read into its buffer when what was in that is written; the unit is updated
when the state is there; and compute waits for the write of the unit before the one that has just been updated.
State in codes has a buffer of its own alone, and is decoded and coded by what computes, before and after its update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from memadvisor.cost.lanes import Lanes
from memadvisor.cost.transfers import TransferTimes
from memadvisor.schedule import Action, ActionKind, Lane, Point, Schedule

PARCEL_ALIGNMENT_BYTES = 64  # of a tensor in what is moved of a unit at once, as allocators align them


class FetchedStates:
    """The two buffers that fetched states take turns in, and that of those in codes, while the optimizer steps; and those
    of parameters and gradients, of units that have these elsewhere too: `paged_bytes` of either, by unit."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        state_bytes: Mapping[str, int],
        paged_bytes: Mapping[str, int],
    ) -> None:
        coded = [name for name, lane in lanes.items() if lane is Lane.COMPUTE]
        others = [name for name in lanes if name not in coded]
        self._buffers = (others[0::2], others[1::2], coded)
        self._state_bytes = state_bytes
        self._paged_bytes = paged_bytes
        self.is_there = False

    def items(self) -> dict[tuple[str, int], int]:
        """Bytes of each buffer, by category and place; there are none beside the optimizer step."""
        if not self.is_there:
            return {}
        sizes: dict[tuple[str, int], int] = {}
        for place, names in enumerate(self._buffers):  # in the order in which the engine makes them
            sizes["optimizer_state", place] = max((self._state_bytes[name] for name in names), default=0)
        for place, names in enumerate(self._buffers):
            paged_bytes = max((self._paged_bytes.get(name, 0) for name in names), default=0)
            sizes["parameter", place] = sizes["gradient", place] = paged_bytes
        return sizes


class PagedUpdates:
    """`traffic`: bytes that are read, and written, for a unit's update. `update_s`: the time of its update."""

    def __init__(
        self,
        schedule: Schedule,
        lanes: Lanes,
        times: TransferTimes | None,
        traffic: Callable[[str], tuple[int, int]],
        update_s: Callable[[str], float],
    ) -> None:
        self._order = schedule.offloaded_states
        if self._order and (times is None or not set(self._order.values()) <= times.bandwidths.keys()):
            raise AssertionError("transfers need bandwidths")
        self._schedule = schedule
        self._late_end_s = 0.0  # of the updates of the step before, where those are delayed
        self._times = times
        self._lanes = lanes
        self._traffic = traffic
        self._update_s = update_s
        self._sides = {unit: place % 2 for place, unit in enumerate(self._order)}
        self._arriving_s: dict[str, float] = {}
        self._written_s = {0: 0.0, 1: 0.0}  # when what each buffer held is on the tier

    def __contains__(self, unit: str) -> bool:
        return unit in self._order

    def begin(self) -> None:
        """With delay the updates of the step before begin with the step, beside all that computes: they take their lane
        for as long as they would take alone."""
        if not self._schedule.delayed_update:
            return
        alone, at_once = Lanes(), replace(self._schedule, delayed_update=False)
        updates = PagedUpdates(at_once, alone, self._times, self._traffic, self._update_s)
        for action in at_once.at(Point.BEFORE_OPTIMIZER):
            if action.unit in updates:
                updates.play(action)
        updates.end()
        for lane in dict.fromkeys(self._order.values()):
            self._late_end_s = self._lanes.transfer(lane, "update of the step before", alone.compute_s)

    def play(self, action: Action) -> None:
        """One of the actions before the optimizer step on a unit that is fetched."""
        if self._schedule.delayed_update:
            self._lanes.wait_for_transfer(self._late_end_s)
            return
        if self._times is None:
            raise AssertionError("transfers need bandwidths")
        unit, lanes = action.unit, self._lanes
        label, side = f"{action.kind} of {unit}", self._sides[unit]
        read_bytes, written_bytes = self._traffic(unit)
        if action.lane is Lane.COMPUTE and action.kind is not ActionKind.UPDATE:
            reads = action.kind is ActionKind.PREFETCH
            seconds = self._times.read_s if reads else self._times.write_s
            lanes.compute(label, seconds(action.lane, read_bytes if reads else written_bytes))
        elif action.kind is ActionKind.PREFETCH:
            read_s = self._times.read_s(action.lane, read_bytes)
            self._arriving_s[unit] = lanes.transfer(action.lane, label, read_s, self._written_s[side])
        elif action.kind is ActionKind.UPDATE:
            lanes.wait_for_transfer(self._arriving_s.pop(unit, 0.0))
            lanes.compute(label, self._update_s(unit))
        elif action.kind is ActionKind.OFFLOAD:
            write_s = self._times.write_s(action.lane, written_bytes)
            self._written_s[side] = lanes.transfer(action.lane, label, write_s)
            lanes.wait_for_transfer(self._written_s[1 - side])

    def end(self) -> None:
        """The last one is written, and the buffers are free."""
        lanes = self._lanes
        for written_s in self._written_s.values():
            lanes.wait_for_transfer(written_s)
        self._written_s = {0: 0.0, 1: 0.0}
