"""Writes a split order for real times under a memory limit, piece by piece as time passes.

After the heuristic of arXiv:2401.10241, section 3.1: as many forwards first as memory and the first B's arrival
allow, then F and B in turn, W where a device would wait for longer than it takes, where memory is full, or (`fill`)
where waiting would make the device the one that has waited longest of all. Two choices are left to try out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.work import Codes, Kind

UNKNOWN = float("inf")  # the piece that makes it has not started yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """`one_more`: a forward before the first B even if it delays that. `fill`: W in gaps shorter than itself."""

    one_more: bool
    fill: bool


_F, _B, _W = int(Kind.F), int(Kind.B), int(Kind.W)  # plain numbers, which index faster


class Greedy:
    """One chunk a device. Lists are by device; `ready_*` also by microbatch, when its input is on the device.

    `one_more_mattered`, `fill_mattered`: whether the order that was written would be another one under the other choice; it
    is the same where not.
    """

    def __init__(
        self,
        costs: Sequence[ChunkCosts],
        links: Sequence[float],
        num_microbatches: int,
        limit_bytes: int,
        choices: Choices,
    ) -> None:
        count = len(costs)
        self.links, self.one_more, self.fill = links, choices.one_more, choices.fill
        self.one_more_mattered = self.fill_mattered = False
        self.total = num_microbatches
        kinds = (Kind.F, Kind.B, Kind.W)
        codes = Codes(count, num_microbatches)
        self.seconds = [[cost.seconds(kind) for kind in kinds] for cost in costs]
        self.bytes = [[cost.held_bytes(kind) for kind in kinds] for cost in costs]
        self.codes = [[codes.first(kind, device) for kind in kinds] for device in range(count)]
        self.most_held_bytes = [limit_bytes - cost.activation_bytes for cost in costs]  # before a forward
        self.orders: list[list[int]] = [[] for _ in costs]
        self.done = [[0, 0, 0] for _ in costs]  # pieces of kind F, B, W
        self.last_forward = [False] * count  # whether F was the last of F and B
        self.held_bytes = [0] * count
        self.waited_s = [0.0] * count
        self.most_waited_s = 0.0
        self.clock = [0.0] * count
        # One more than there are microbatches: no piece is behind the last.
        none = [UNKNOWN] * (num_microbatches + 1)
        self.ready_forward = [[0.0] * num_microbatches + [UNKNOWN]] + [none.copy() for _ in range(count - 1)]
        self.ready_backward = [none.copy() for _ in costs]
        self.turns = [(0.0, device) for device in range(count)]
        self.asleep = [False] * count  # until a piece that they could need starts elsewhere

    def run(self) -> tuple[list[int], ...]:
        """The order of every device."""
        turns, done, clock, turn, total = self.turns, self.done, self.clock, self._turn, self.total
        while turns:
            now, device = heapq.heappop(turns)
            if done[device][_W] < total:
                turn(device, max(now, clock[device]))
        assert all(pieces[_W] == total for pieces in done), "the devices wait for each other"
        return tuple(self.orders)

    def _turn(self, device: int, now: float) -> None:
        """Run one piece, or come back later."""
        forwards, backwards, weights = self.done[device]
        total = self.total
        forward = self.ready_forward[device][forwards]
        backward = self.ready_backward[device][backwards]
        may_forward = False
        if forwards < total:
            may_forward = self.held_bytes[device] <= self.most_held_bytes[device]
            if not may_forward:
                if weights < backwards and not (backward <= now and self.last_forward[device]):
                    self._run(device, _W, now)
                    return
                forward = UNKNOWN
        if not backwards:
            self._first(device, now, forward, backward)
        elif backwards == total:
            self._run(device, _W, now)
        else:
            wants_forward = may_forward and (not self.last_forward[device] or backwards == forwards)
            self._steady(device, now, forward, backward, wants_forward)

    def _first(self, device: int, now: float, forward: float, backward: float) -> None:
        """Before the first B: forwards, as long as they do not delay it."""
        in_time = backward == UNKNOWN or now + self.seconds[device][_F] <= backward
        could = forward <= now and not in_time and backward > now
        self.one_more_mattered |= could
        if (forward <= now and in_time) or (could and self.one_more):
            self._run(device, _F, now)
        elif backward <= now or (backward < UNKNOWN and forward <= now) or forward == UNKNOWN != backward:
            self._run(device, _B, max(now, backward))
        elif min(forward, backward) < UNKNOWN:
            heapq.heappush(self.turns, (min(forward, backward), device))
        else:
            self.asleep[device] = True

    def _steady(self, device: int, now: float, forward: float, backward: float, wants_forward: bool) -> None:
        """F and B in turn, another piece where the next one's input is not there yet."""
        wanted, ready = (_F, forward) if wants_forward else (_B, backward)
        if ready <= now:
            self._run(device, wanted, now)
            return
        gap_s = ready - now
        if wants_forward:
            if backward <= now:
                self._run(device, _B, now)
                return
        elif forward <= now and gap_s >= self.seconds[device][_F]:
            self._run(device, _F, now)
            return
        done = self.done[device]
        if done[_W] < done[_B]:
            fits = gap_s >= self.seconds[device][_W]
            could = not fits and self.waited_s[device] + gap_s > self.most_waited_s
            self.fill_mattered |= could
            if fits or (could and self.fill):
                self._run(device, _W, now)
                return
        if ready < UNKNOWN:
            self._run(device, wanted, ready)
        else:
            self.asleep[device] = True

    def _run(self, device: int, kind: int, start: float) -> None:
        done, order = self.done[device], self.orders[device]
        if order:
            waited_s = self.waited_s[device] + (start - self.clock[device])
            self.waited_s[device] = waited_s
            if waited_s > self.most_waited_s:
                self.most_waited_s = waited_s
        microbatch = done[kind]
        done[kind] = microbatch + 1
        self.held_bytes[device] += self.bytes[device][kind]
        self.clock[device] = end = start + self.seconds[device][kind]
        order.append(self.codes[device][kind] + microbatch)
        heapq.heappush(self.turns, (end, device))
        if kind == _W:
            return
        self.last_forward[device] = kind == _F
        if kind == _B:
            if device:
                self.ready_backward[device - 1][microbatch] = end + self.links[device - 1]
                self._wake(device - 1, start)
        elif device < len(self.orders) - 1:
            self.ready_forward[device + 1][microbatch] = end + self.links[device]
            self._wake(device + 1, start)
        else:
            self.ready_backward[device][microbatch] = end

    def _wake(self, device: int, now: float) -> None:
        if self.asleep[device]:
            self.asleep[device] = False
            heapq.heappush(self.turns, (max(now, self.clock[device]), device))
