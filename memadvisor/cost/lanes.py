"""Lanes and their clocks: compute, collective, transfers to host and disk. Work of one lane runs piece after piece.

While compute and a collective run at the same time both may be slower than alone (they share cores and memory): a second
of the one takes `slowdown`'s factor of seconds for as long as the other goes on too, as in Galvatron (arXiv:2211.13878,
section 3.4). So when a collective ends is known only when compute has come there.

One rank is played for all. The slowest takes longer for the same compute, by a `spread` of what has been computed since
ranks last waited for each other; a collective begins that much after it is issued.

And a collective is late by chance: the thread that does it needs a core and the interpreter's lock while others compute,
on every rank. Of these delays only the mean is known, `late_s`; they are taken to be exponentially distributed (which
assumes least: among distributions of positive numbers with a given mean it has the largest entropy, Jaynes 1957). So
who waits for a collective when s seconds have passed since it should have ended stands still for late_s exp(-s / late_s)
more on average: for all of its delay where nothing was computed meanwhile, and hardly at all where much was. The lane's
thread does one collective after another, so it stands still for a delay in the same way.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from memadvisor.hardware.hardware import OverlapSlowdown
from memadvisor.schedule import Lane

NO_COLLECTIVE = -1  # the number of none: waiting for it takes no time
_ALONE = OverlapSlowdown(compute=1.0, collective=1.0)


@dataclass(frozen=True, slots=True)
class Interval:
    """What a lane does from one moment of the step to another, in seconds from its start."""

    lane: Lane
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Carried:
    """What collectives that go on in the next step do before it begins, in seconds from there; by how much compute is
    slower for them, and what it takes to begin them."""

    intervals: tuple[Interval, ...] = ()
    slowed_s: float = 0.0
    begun_s: float = 0.0


@dataclass(slots=True)
class _Queued:
    """A collective that nobody has waited for: seconds that it would still take alone.

    `not_before_s`: when all ranks have come, and what was late before it is over; `computed_s`: how much had been computed
    when it was issued; `follows`: whether one thread does it and what came before it.
    """

    number: int
    label: str
    left_s: float
    not_before_s: float
    computed_s: float
    follows: bool
    start_s: float | None = None
    end_s: float = 0.0


@dataclass(slots=True)
class Lanes:
    """`compute_s` is when compute is free again; `exposed_s` is its waiting for collectives.

    `transfers_s`: when the lanes of other tiers are free again; `exposed_transfer_s`: compute's waiting for these.
    `slowed_s`: by how much compute was slower for the collectives that ran under it. `alone_s`: what compute would have
    taken without them, by the first word of its labels.
    """

    slowdown: OverlapSlowdown = _ALONE
    compute_s: float = 0.0
    exposed_s: float = 0.0
    slowed_s: float = 0.0
    alone_s: dict[str, float] = field(default_factory=dict)
    transfers_s: dict[Lane, float] = field(default_factory=dict)
    exposed_transfer_s: float = 0.0
    _lanes: list[Lane] = field(
        default_factory=list
    )  # these four: the intervals, as lists that are cheap to keep
    _labels: list[str] = field(default_factory=list)
    _starts_s: list[float] = field(default_factory=list)
    _ends_s: list[float] = field(default_factory=list)
    _queue: deque[_Queued] = field(default_factory=deque)
    _ended: deque[_Queued] = field(default_factory=deque)  # in order, until they are waited for
    _num_collectives: int = 0
    _computed_s: float = 0.0  # as it would have taken alone
    _met_s: float = 0.0  # how much had been computed when ranks last waited for each other

    @property
    def intervals(self) -> list[Interval]:
        """In the order of their ends on each lane."""
        return list(map(Interval, self._lanes, self._labels, self._starts_s, self._ends_s))

    def _occupy(self, lane: Lane, label: str, start_s: float, end_s: float) -> None:
        self._lanes.append(lane)
        self._labels.append(label)
        self._starts_s.append(start_s)
        self._ends_s.append(end_s)

    def compute(self, label: str, duration_s: float) -> None:
        start_s, left_s = self.compute_s, duration_s
        kind = label.partition(" ")[0]
        self.alone_s[kind] = self.alone_s.get(kind, 0.0) + duration_s
        while self._queue and left_s > 0:
            missing_s = self._queue[0].not_before_s - self.compute_s
            if missing_s >= left_s:
                break  # another rank has not come yet
            if missing_s > 0:
                self.compute_s, left_s = self._queue[0].not_before_s, left_s - missing_s
            both_s = min(left_s * self.slowdown.compute, self._queue[0].left_s * self.slowdown.collective)
            done_s = both_s / self.slowdown.compute
            # The last of either ends exactly, whatever rounding says.
            left_s = 0.0 if both_s == left_s * self.slowdown.compute else left_s - done_s
            self._collect(both_s, both_s / self.slowdown.collective)
        self.compute_s += left_s
        self._computed_s += duration_s
        self.slowed_s += self.compute_s - start_s - duration_s
        self._occupy(Lane.COMPUTE, label, start_s, self.compute_s)

    def _collect(self, duration_s: float, done_s: float) -> None:
        """Time passes in which the first of the queue gets on by `done_s`, and no further than to its end."""
        first = self._queue[0]
        if first.start_s is None:
            first.start_s = self.compute_s
        self.compute_s += duration_s
        first.left_s -= done_s
        if first.left_s <= 1e-12:
            first.end_s = self.compute_s
            self._ended.append(self._queue.popleft())
            if self._queue and (following := self._queue[0]).follows:
                following.not_before_s = self._late_s(first, max(following.not_before_s, first.end_s))
            self._occupy(Lane.COLLECTIVE, first.label, first.start_s, self.compute_s)

    def collective(self, label: str, duration_s: float, *, follows: bool = True) -> int:
        """Queue a collective that may start when all ranks have come; returns its number, to wait for.

        follows: the lane's thread does it, so that a delay of what it does before delays it too.
        """
        not_before_s = self._come_s()
        if self._ended and not self._queue and follows:
            not_before_s = self._late_s(self._ended[-1], not_before_s)
        queued = _Queued(self._num_collectives, label, duration_s, not_before_s, self._computed_s, follows)
        self._queue.append(queued)
        self._num_collectives += 1
        return queued.number

    def _come_s(self) -> float:
        """When the slowest rank is as far as this one is now."""
        return self.compute_s + (self.slowdown.spread or 0.0) * (self._computed_s - self._met_s)

    def wait_for(self, number: int) -> None:
        """Compute stands still until a collective has ended."""
        start_s = self.compute_s
        while self._queue and self._queue[0].number <= number:
            self.compute_s = max(self.compute_s, self._queue[0].not_before_s)
            self._collect(self._queue[0].left_s, self._queue[0].left_s)
        last: _Queued | None = None
        while self._ended and self._ended[0].number <= number:
            last = self._ended.popleft()
        if last is not None:
            # Who had to wait goes on together with all others; else these have come as far as to issue it.
            self._met_s = (
                self._computed_s if last.end_s >= self.compute_s else max(self._met_s, last.computed_s)
            )
            self._stand_still(self._late_s(last, self.compute_s))
        self.exposed_s += self.compute_s - start_s

    def meet(self, duration_s: float) -> None:
        """All ranks wait for each other, by a message that goes beside those of the lane."""
        start_s = self.compute_s
        self._stand_still(self._come_s() + duration_s + (self.slowdown.late_s or 0.0))
        self._met_s = self._computed_s
        self.exposed_s += self.compute_s - start_s

    def _late_s(self, ended: _Queued, now_s: float) -> float:
        """When on average is over what should have been before now, and who waits for it goes on."""
        late_s = self.slowdown.late_s
        return now_s + late_s * math.exp((ended.end_s - now_s) / late_s) if late_s else now_s

    def _stand_still(self, until_s: float) -> None:
        """Collectives go on meanwhile."""
        while self._queue and self.compute_s < until_s:
            first = self._queue[0]
            if first.not_before_s >= until_s:
                break
            self.compute_s = max(self.compute_s, first.not_before_s)
            alone_s = min(first.left_s, until_s - self.compute_s)
            self._collect(alone_s, alone_s)
        self.compute_s = max(self.compute_s, until_s)

    def begin_step(self) -> Carried:
        """A step begins, under which what has been queued goes on; gives what was before, and forgets it."""
        now_s = self.compute_s
        for queued in self._queue:
            if queued.start_s is not None:
                self._occupy(Lane.COLLECTIVE, queued.label, queued.start_s, now_s)
                queued.start_s = None
            queued.not_before_s -= now_s
        for ended in self._ended:
            ended.end_s -= now_s
        before = tuple(
            Interval(each.lane, each.label, each.start_s - now_s, each.end_s - now_s)
            for each in self.intervals
            if each.lane is Lane.COLLECTIVE
        )
        carried = Carried(before, self.slowed_s, self.alone_s.get("engine", 0.0))
        for kept in (self._lanes, self._labels, self._starts_s, self._ends_s, self.alone_s):
            kept.clear()
        self.compute_s = self.exposed_s = self.slowed_s = 0.0
        return carried

    def end_step(self, carried: Carried) -> None:
        """A step ends as the one before it did."""
        if carried.begun_s:
            self.compute("engine at gathers of what is updated", carried.begun_s)
        self.compute_s += carried.slowed_s
        self.slowed_s += carried.slowed_s
        for each in carried.intervals:
            self._occupy(each.lane, each.label, self.compute_s + each.start_s, self.compute_s + each.end_s)

    def transfer(self, lane: Lane, label: str, duration_s: float, not_before_s: float = 0.0) -> float:
        """Queue a transfer that may start now, or later; returns when it ends."""
        start_s = max(self.transfers_s.get(lane, 0.0), self.compute_s, not_before_s)
        self.transfers_s[lane] = start_s + duration_s
        self._occupy(lane, label, start_s, self.transfers_s[lane])
        return self.transfers_s[lane]

    def wait_for_transfer(self, end_s: float) -> None:
        """Compute stands still until a transfer has ended."""
        self.exposed_transfer_s += max(0.0, end_s - self.compute_s)
        self._stand_still(end_s)
