"""Lanes and their clocks: compute, collective, transfers to host and disk. Work of one lane runs piece after piece."""

from __future__ import annotations

from dataclasses import dataclass, field

from memadvisor.schedule import Lane


@dataclass(frozen=True, slots=True)
class Interval:
    """What a lane does from one moment of the step to another, in seconds from its start."""

    lane: Lane
    label: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Lanes:
    """`compute_s` and `collective_s` are when each lane is free again; `exposed_s` is compute's waiting.

    `transfers_s`: when the lanes of other tiers are free again; `exposed_transfer_s`: compute's waiting for these.
    """

    compute_s: float = 0.0
    collective_s: float = 0.0
    exposed_s: float = 0.0
    transfers_s: dict[Lane, float] = field(default_factory=dict)
    exposed_transfer_s: float = 0.0
    intervals: list[Interval] = field(default_factory=list)

    def compute(self, label: str, duration_s: float) -> None:
        start_s = self.compute_s
        self.compute_s += duration_s
        self.intervals.append(Interval(Lane.COMPUTE, label, start_s, self.compute_s))

    def collective(self, label: str, duration_s: float) -> float:
        """Queue a collective that may start now; returns when it ends."""
        start_s = max(self.collective_s, self.compute_s)
        self.collective_s = start_s + duration_s
        self.intervals.append(Interval(Lane.COLLECTIVE, label, start_s, self.collective_s))
        return self.collective_s

    def transfer(self, lane: Lane, label: str, duration_s: float, not_before_s: float = 0.0) -> float:
        """Queue a transfer that may start now, or later; returns when it ends."""
        start_s = max(self.transfers_s.get(lane, 0.0), self.compute_s, not_before_s)
        self.transfers_s[lane] = start_s + duration_s
        self.intervals.append(Interval(lane, label, start_s, self.transfers_s[lane]))
        return self.transfers_s[lane]

    def wait_for_transfer(self, end_s: float) -> None:
        """Compute stands still until a transfer has ended."""
        waiting_s = max(0.0, end_s - self.compute_s)
        self.exposed_transfer_s += waiting_s
        self.compute_s += waiting_s

    def wait_until(self, end_s: float) -> None:
        """Compute stands still until a collective has ended."""
        waiting_s = max(0.0, end_s - self.compute_s)
        self.exposed_s += waiting_s
        self.compute_s += waiting_s
