"""Lanes and their clocks: compute, collective, transfers to host and disk. Work of one lane runs piece after piece.

While compute and a collective run at the same time both may be slower than alone (they share cores and memory): a second
of the one takes `slowdown`'s factor of seconds for as long as the other goes on too, as in Galvatron (arXiv:2211.13878,
section 3.4). So when a collective ends is known only when compute has come there.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class _Queued:
    """A collective that has not ended: seconds that it would still take alone."""

    number: int
    label: str
    left_s: float
    start_s: float | None = None


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
    _num_collectives: int = 0

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
            both_s = min(left_s * self.slowdown.compute, self._queue[0].left_s * self.slowdown.collective)
            done_s = both_s / self.slowdown.compute
            # The last of either ends exactly, whatever rounding says.
            left_s = 0.0 if both_s == left_s * self.slowdown.compute else left_s - done_s
            self._collect(both_s, both_s / self.slowdown.collective)
        self.compute_s += left_s
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
            self._queue.popleft()
            self._occupy(Lane.COLLECTIVE, first.label, first.start_s, self.compute_s)

    def collective(self, label: str, duration_s: float) -> int:
        """Queue a collective that may start now; returns its number, to wait for."""
        self._queue.append(_Queued(self._num_collectives, label, duration_s))
        self._num_collectives += 1
        return self._num_collectives - 1

    def wait_for(self, number: int) -> None:
        """Compute stands still until a collective has ended."""
        start_s = self.compute_s
        while self._queue and self._queue[0].number <= number:
            self._collect(self._queue[0].left_s, self._queue[0].left_s)
        self.exposed_s += self.compute_s - start_s

    def transfer(self, lane: Lane, label: str, duration_s: float, not_before_s: float = 0.0) -> float:
        """Queue a transfer that may start now, or later; returns when it ends."""
        start_s = max(self.transfers_s.get(lane, 0.0), self.compute_s, not_before_s)
        self.transfers_s[lane] = start_s + duration_s
        self._occupy(lane, label, start_s, self.transfers_s[lane])
        return self.transfers_s[lane]

    def wait_for_transfer(self, end_s: float) -> None:
        """Compute stands still until a transfer has ended."""
        waiting_s = max(0.0, end_s - self.compute_s)
        self.exposed_transfer_s += waiting_s
        while self._queue and self.compute_s < end_s:
            alone_s = min(self._queue[0].left_s, end_s - self.compute_s)
            self._collect(alone_s, alone_s)
        self.compute_s = max(self.compute_s, end_s)
