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
_NONE = -1  # no piece now
_MARGIN = 1 + 1e-9  # beyond which no rounding of sums is


class _Device:
    """What a device has done and holds. `ready_*` are by microbatch, when its input is on the device; by kind: `there`, the
    same where every piece begins as soon as its order lets it, `ended_s` and `idle_s` then: what playing the order shows.
    """

    __slots__ = ("asleep", "bytes", "clock", "codes", "done", "ended_s", "held_bytes", "idle_s", "last_forward", "most_held_bytes", "order", "ready_backward", "ready_forward", "seconds", "there", "waited_s")  # fmt: skip

    def __init__(
        self, cost: ChunkCosts, codes: list[int], num_microbatches: int, limit_bytes: int, *, is_first: bool
    ) -> None:
        kinds = (Kind.F, Kind.B, Kind.W)
        self.seconds = [cost.seconds(kind) for kind in kinds]
        self.bytes = [cost.held_bytes(kind) for kind in kinds]
        self.codes = codes
        self.most_held_bytes = limit_bytes - cost.activation_bytes  # before a forward
        self.order: list[int] = []
        self.done = [0, 0, 0]  # pieces of kind F, B, W
        self.last_forward = False  # whether F was the last of F and B
        self.held_bytes = 0
        self.waited_s = self.clock = 0.0
        # One more than there are microbatches: no piece is behind the last.
        none = [UNKNOWN] * (num_microbatches + 1)
        self.ready_forward = [0.0] * num_microbatches + [UNKNOWN] if is_first else none.copy()
        self.ready_backward = none
        self.asleep = False  # until a piece that it could need starts elsewhere
        # Of a W none: what it needs is on the device.
        self.there = [self.ready_forward.copy(), none.copy(), [0.0] * (num_microbatches + 1)]
        self.ended_s = 0.0
        self.idle_s = -UNKNOWN  # until it has begun

    @property
    def work_s(self) -> float:
        """Of all its pieces."""
        return sum(self.seconds) * (len(self.ready_forward) - 1)


class Greedy:
    """One chunk a device.

    `one_more_mattered`, `fill_mattered`: whether the order that was written would be another one under the other choice; it
    is the same where not. `sequence`: the device of each piece, in the order that they began: none before what it needs.
    """

    def __init__(
        self,
        costs: Sequence[ChunkCosts],
        links: Sequence[float],
        num_microbatches: int,
        limit_bytes: int,
        choices: Choices,
    ) -> None:
        self.links, self.one_more, self.fill = links, choices.one_more, choices.fill
        self.one_more_mattered = self.fill_mattered = False
        self.total = num_microbatches
        self.most_waited_s = 0.0
        self.sequence: list[int] = []
        codes = Codes(len(costs), num_microbatches)
        self.devices = [
            _Device(
                cost,
                [codes.first(kind, device) for kind in (Kind.F, Kind.B, Kind.W)],
                num_microbatches,
                limit_bytes,
                is_first=not device,
            )
            for device, cost in enumerate(costs)
        ]

    def run(self, within_s: float = UNKNOWN) -> tuple[list[int], ...] | None:
        """The order of every device; None as soon as one is sure to take longer than `within_s` from its first piece to its last."""
        devices, total, choose, began = self.devices, self.total, self._choose, self.sequence.append
        turns = [(0.0, number) for number in range(len(devices))]
        most_idle_s = [within_s * _MARGIN - device.work_s for device in devices]
        while turns:
            now, number = heapq.heappop(turns)
            device = devices[number]
            while device.done[_W] < total:
                kind, start = choose(device, now if now > device.clock else device.clock)
                if kind == _NONE:
                    if start < UNKNOWN:
                        heapq.heappush(turns, (start, number))
                    else:
                        device.asleep = True
                    break
                began(number)
                end = self._begin(device, kind, start)
                if device.idle_s > most_idle_s[number]:
                    return None
                if kind != _W:
                    self._tell(number, kind, device.done[kind] - 1, start, end, turns)
                now, number = heapq.heappushpop(turns, (end, number))
                device = devices[number]
        assert all(device.done[_W] == total for device in devices), "the devices wait for each other"
        return tuple(device.order for device in devices)

    def _choose(self, device: _Device, now: float) -> tuple[int, float]:
        """The piece that comes next and when it starts; or none, and when to look again."""
        forwards, backwards, weights = device.done
        total = self.total
        forward, backward = device.ready_forward[forwards], device.ready_backward[backwards]
        may_forward = False
        if forwards < total:
            may_forward = device.held_bytes <= device.most_held_bytes
            if not may_forward:
                if weights < backwards and not (backward <= now and device.last_forward):
                    return _W, now
                forward = UNKNOWN
        if not backwards:
            return self._first(device, now, forward, backward)
        if backwards == total:
            return _W, now
        # F and B in turn, another piece where the next one's input is not there yet.
        wants_forward = may_forward and (not device.last_forward or backwards == forwards)
        wanted, ready = (_F, forward) if wants_forward else (_B, backward)
        if ready <= now:
            return wanted, now
        gap_s = ready - now
        if wants_forward:
            if backward <= now:
                return _B, now
        elif forward <= now and gap_s >= device.seconds[_F]:
            return _F, now
        if weights < backwards:
            fits = gap_s >= device.seconds[_W]
            could = not fits and device.waited_s + gap_s > self.most_waited_s
            self.fill_mattered |= could
            if fits or (could and self.fill):
                return _W, now
        return (wanted, ready) if ready < UNKNOWN else (_NONE, UNKNOWN)

    def _first(self, device: _Device, now: float, forward: float, backward: float) -> tuple[int, float]:
        """Before the first B: forwards, as long as they do not delay it."""
        in_time = backward == UNKNOWN or now + device.seconds[_F] <= backward
        could = forward <= now and not in_time and backward > now
        self.one_more_mattered |= could
        if (forward <= now and in_time) or (could and self.one_more):
            return _F, now
        if backward <= now or (backward < UNKNOWN and forward <= now) or forward == UNKNOWN != backward:
            return _B, max(now, backward)
        return _NONE, min(forward, backward)

    def _begin(self, device: _Device, kind: int, start: float) -> float:
        """When the piece ends."""
        order = device.order
        if order:
            waited_s = device.waited_s + (start - device.clock)
            device.waited_s = waited_s
            if waited_s > self.most_waited_s:
                self.most_waited_s = waited_s
        microbatch = device.done[kind]
        device.done[kind] = microbatch + 1
        device.held_bytes += device.bytes[kind]
        order.append(device.codes[kind] + microbatch)
        duration_s = device.seconds[kind]
        there_s, ended_s = device.there[kind][microbatch], device.ended_s
        if len(order) == 1:
            device.idle_s = 0.0
        elif there_s > ended_s:
            device.idle_s += there_s - ended_s
        device.ended_s = (there_s if there_s > ended_s else ended_s) + duration_s
        device.clock = end = start + duration_s
        return end

    def _tell(
        self,
        number: int,
        kind: int,
        microbatch: int,
        start: float,
        end: float,
        turns: list[tuple[float, int]],
    ) -> None:
        """A forward's or backward's result is on its way to who needs it, who may be asleep until then."""
        self.devices[number].last_forward = kind == _F
        if kind == _B:
            if not number:
                return
            other = number - 1
            device = self.devices[other]
            device.ready_backward[microbatch] = end + self.links[other]
            device.there[_B][microbatch] = self.devices[number].ended_s + self.links[other]
        elif number < len(self.devices) - 1:
            other = number + 1
            device = self.devices[other]
            device.ready_forward[microbatch] = end + self.links[number]
            device.there[_F][microbatch] = self.devices[number].ended_s + self.links[number]
        else:
            self.devices[number].ready_backward[microbatch] = end
            self.devices[number].there[_B][microbatch] = self.devices[number].ended_s
            return
        if device.asleep:
            device.asleep = False
            heapq.heappush(turns, (max(start, device.clock), other))
