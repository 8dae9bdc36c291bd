"""The pace of 1F1B that never empties (PipeDream-2BW): seconds a microbatch, exactly.

In the steady state device d has p-d microbatches in flight. A microbatch that goes down from device i to device j and
comes back up lets one start at i that is j-i+1 later, so these devices need the time of that round trip for j-i+1
microbatches; i = j is a device's own work. Every longer way through the graph is made of such round trips, so the
slowest of them is the pace (the maximum cycle mean of a max-plus system; Baccelli et al., Synchronization and
Linearity, 1992).
"""

from __future__ import annotations

from collections.abc import Sequence

from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.work import Kind


def steady_step_s(costs: Sequence[ChunkCosts], links: Sequence[float], blocking: bool) -> float:
    """Seconds between two microbatches' ends, one chunk a device, device d on link d to the next."""
    work = [cost.seconds(Kind.F) + cost.seconds(Kind.BW) for cost in costs]
    last = len(work) - 1
    slowest = 0.0
    for first in range(len(work)):
        # A device that does not compute during transfers loses those at both ends of the round trip.
        round_trip = links[first - 1] if blocking and first else 0.0
        for device in range(first, len(work)):
            round_trip += work[device]
            turn = links[device] if blocking and device < last else 0.0
            slowest = max(slowest, (round_trip + turn) / (device - first + 1))
            if device < last:
                round_trip += 2 * links[device]
    return slowest
