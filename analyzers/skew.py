"""How unlike the ranks are, and who holds the others up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from memadvisor.analyzers.clocks import RankClock
from memadvisor.analyzers.communication import Communication, compute_intervals
from memadvisor.analyzers.intervals import length, union
from memadvisor.analyzers.matching import Matched
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.sides import Key
from memadvisor.analyzers.step_time import StepTime
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank beside the others.

    `caused_waiting_s` sums over the other ranks the moments of the traced step in which each waited for a
    collective that this rank was the last to start: of two ranks it is what the other one waited.
    """

    rank: int
    step_time_s: float | None  # median steady step
    compute_s: float | None  # in operators of the traced step
    waiting_s: float | None
    caused_waiting_s: float | None
    peak_allocated_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """Differences between ranks. A spread is (max - min) / median, as a fraction of 1.

    `straggler` is the rank that caused the others to wait most; None where nobody waited or it cannot be told.
    `clocks` are what the comparison of their times rests on.
    """

    ranks: tuple[RankTimes, ...]
    clocks: tuple[RankClock, ...]
    straggler: int | None
    step_time_spread: float | None
    compute_spread: float | None
    peak_spread: float | None


def skew(
    ranks: Sequence[RankRun],
    clocks: Sequence[RankClock],
    matched: Mapping[Key, Matched],
    times: Sequence[StepTime | None],
    traffic: Sequence[Communication | None],
    peaks: Sequence[PeakBreakdown | None],
) -> Skew | None:
    """Compare the ranks; the other results are in the ranks' order. None for a single rank."""
    if len(ranks) < 2:
        return None
    caused = _caused_waiting_s(ranks, matched)
    rows = tuple(
        RankTimes(
            rank=rank.process.rank,
            step_time_s=None if time is None else time.median_s,
            compute_s=length(compute_intervals(rank)) if rank.traced_step and rank.operators else None,
            waiting_s=None if sent is None else sent.waiting_s,
            caused_waiting_s=caused.get(rank.process.rank),
            peak_allocated_bytes=None if peak is None else peak.allocated_bytes,
        )
        for rank, time, sent, peak in zip(ranks, times, traffic, peaks, strict=True)
    )
    worst = max(caused, key=lambda rank: caused[rank]) if caused else None
    return Skew(
        ranks=rows,
        clocks=tuple(clocks),
        straggler=worst if worst is not None and caused[worst] > 0 else None,
        step_time_spread=_spread([row.step_time_s for row in rows]),
        compute_spread=_spread([row.compute_s for row in rows]),
        peak_spread=_spread([row.peak_allocated_bytes for row in rows]),
    )


def _caused_waiting_s(ranks: Sequence[RankRun], matched: Mapping[Key, Matched]) -> dict[int, float]:
    """By rank; empty where no collective could be matched. Who waits in several at once waits once."""
    caused = {rank.process.rank: 0.0 for rank in ranks} if matched else {}
    waits: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for match in matched.values():
        for rank, issue_s in match.issue_s.items():
            waits[match.last_rank, rank].append((issue_s, match.last_start_s))
    for (awaited, _), moments in waits.items():
        caused[awaited] += length(union(moments))
    return caused


def _spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < 2 or median(known) <= 0:
        return None
    return (max(known) - min(known)) / median(known)
