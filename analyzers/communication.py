"""What communication costs: bytes, time, how much of it hides behind compute, who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationBandwidth:
    """All collectives of one operation, message size and group size, in the traced step.

    With t the median time from the last rank's start to the end: algorithm bandwidth is bytes / t, bus
    bandwidth is that times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all,
    and 1 for the rest (nccl-tests, doc/PERFORMANCE.md). Collectives in flight together share the link, so
    these are lower bounds on what it can do. None where a rank's record is missing.
    """

    operation: str
    size_bytes: int
    group_size: int
    num_calls: int
    duration_s: float | None  # t
    algorithm_bytes_per_s: float | None
    bus_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One rank's collectives in the traced step, so its times carry the tracing's own cost.

    `time_s` is the length of the union of [issue, end) of all collectives. `exposed_s` is the part of it
    in which no operator ran, `overlapped_s` the rest. `waiting_s` is the part spent waiting for the last
    rank of each group to start (matched by group and sequence); None where another rank's record is missing.
    """

    bytes: int
    num_calls: int
    num_unfinished: int  # whose end was not seen: their time counts nowhere
    time_s: float
    exposed_s: float
    overlapped_s: float
    waiting_s: float | None
    operations: tuple[OperationBandwidth, ...]  # most bytes first


def communication(rank: RankRun, ranks: Sequence[RankRun]) -> Communication | None:
    """Analyse `rank`'s collectives, matched with those of all `ranks`. None when no step was traced."""
    raise NotImplementedError
