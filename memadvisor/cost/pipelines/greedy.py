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


class Greedy:
    """One chunk a device. Lists are by device; `ready_*` also by microbatch, when its input is on the device."""

    def __init__(
        self,
        costs: Sequence[ChunkCosts],
        links: Sequence[float],
        num_microbatches: int,
        limit_bytes: int,
        choices: Choices,
    ) -> None:
        count = len(costs)
        self.costs, self.links, self.choices = costs, links, choices
        self.total, self.limit_bytes = num_microbatches, limit_bytes
        self.codes = Codes(count, num_microbatches)
        self.orders: list[list[int]] = [[] for _ in costs]
        self.done = [[0, 0, 0] for _ in costs]  # pieces of kind F, B, W
        self.last_forward = [False] * count  # whether F was the last of F and B
        self.held_bytes = [0] * count
        self.waited_s = [0.0] * count
        self.clock = [0.0] * count
        self.ready_forward = [[0.0] * num_microbatches] + [
            [UNKNOWN] * num_microbatches for _ in range(count - 1)
        ]
        self.ready_backward = [[UNKNOWN] * num_microbatches for _ in costs]
        self.turns = [(0.0, device) for device in range(count)]
        self.asleep: set[int] = set()  # until a piece that they could need starts elsewhere

    def run(self) -> tuple[list[int], ...]:
        """The order of every device."""
        while self.turns:
            now, device = heapq.heappop(self.turns)
            if self.done[device][Kind.W] < self.total:
                self._turn(device, max(now, self.clock[device]))
        assert all(done[Kind.W] == self.total for done in self.done), "the devices wait for each other"
        return tuple(self.orders)

    def _turn(self, device: int, now: float) -> None:
        """Run one piece, or come back later."""
        forwards, backwards, weights = self.done[device]
        forward = self.ready_forward[device][forwards] if forwards < self.total else UNKNOWN
        backward = self.ready_backward[device][backwards] if backwards < self.total else UNKNOWN
        fits = self.held_bytes[device] + self.costs[device].activation_bytes <= self.limit_bytes
        may_forward = fits and forwards < self.total
        owes = weights < backwards
        if (
            forwards < self.total
            and not fits
            and owes
            and not (backward <= now and self.last_forward[device])
        ):
            self._run(device, Kind.W, now)
        elif not backwards:
            self._first(device, now, forward if may_forward else UNKNOWN, backward)
        elif backwards == self.total:
            self._run(device, Kind.W, now)
        else:
            wants_forward = may_forward and (not self.last_forward[device] or backwards == forwards)
            self._steady(device, now, forward if may_forward else UNKNOWN, backward, wants_forward)

    def _first(self, device: int, now: float, forward: float, backward: float) -> None:
        """Before the first B: forwards, as long as they do not delay it."""
        free_again = now + self.costs[device].forward_s
        if forward <= now and (
            backward == UNKNOWN or free_again <= backward or (self.choices.one_more and backward > now)
        ):
            self._run(device, Kind.F, now)
        elif backward <= now or (backward < UNKNOWN and forward <= now) or forward == UNKNOWN != backward:
            self._run(device, Kind.B, max(now, backward))
        elif min(forward, backward) < UNKNOWN:
            heapq.heappush(self.turns, (min(forward, backward), device))
        else:
            self.asleep.add(device)

    def _steady(self, device: int, now: float, forward: float, backward: float, wants_forward: bool) -> None:
        """F and B in turn, another piece where the next one's input is not there yet."""
        wanted, ready = (Kind.F, forward) if wants_forward else (Kind.B, backward)
        weight_s = self.costs[device].weight_backward_s
        gap_s = ready - now
        most_waited_s = max(self.waited_s)
        if ready <= now:
            self._run(device, wanted, now)
        elif wants_forward and backward <= now:
            self._run(device, Kind.B, now)
        elif not wants_forward and forward <= now and gap_s >= self.costs[device].forward_s:
            self._run(device, Kind.F, now)
        elif self.done[device][Kind.W] < self.done[device][Kind.B] and (
            gap_s >= weight_s or (self.choices.fill and self.waited_s[device] + gap_s > most_waited_s)
        ):
            self._run(device, Kind.W, now)
        elif ready < UNKNOWN:
            self._run(device, wanted, ready)
        else:
            self.asleep.add(device)

    def _run(self, device: int, kind: Kind, start: float) -> None:
        cost, done = self.costs[device], self.done[device]
        if self.orders[device]:
            self.waited_s[device] += start - self.clock[device]
        microbatch = done[kind]
        done[kind] += 1
        self.held_bytes[device] += cost.held_bytes(kind)
        self.clock[device] = end = start + cost.seconds(kind)
        self.orders[device].append(self.codes.first(kind, device) + microbatch)
        heapq.heappush(self.turns, (end, device))
        if kind is Kind.W:
            return
        self.last_forward[device] = kind is Kind.F
        if kind is Kind.B and device:
            self.ready_backward[device - 1][microbatch] = end + self.links[device - 1]
            self._wake(device - 1, start)
        elif kind is Kind.F and device < len(self.costs) - 1:
            self.ready_forward[device + 1][microbatch] = end + self.links[device]
            self._wake(device + 1, start)
        elif kind is Kind.F:
            self.ready_backward[device][microbatch] = end

    def _wake(self, device: int, now: float) -> None:
        if device in self.asleep:
            self.asleep.discard(device)
            heapq.heappush(self.turns, (max(now, self.clock[device]), device))
