"""What communication costs: bytes, time, how much of it hides behind compute, who waits for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from memadvisor.analyzers.intervals import Intervals, length, minus, union
from memadvisor.analyzers.matching import Key, Matched, key_of, traced_collectives
from memadvisor.run.records import Collective
from memadvisor.run.run import RankRun

_COLLECTIVE_OPERATORS = ("c10d::", "c10d_functional::", "_c10d_functional::")


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

    `time_s` is the length of the union of [issue, end) of all collectives; None where no end was seen.
    `exposed_s` is the part of it in which no operator ran, `overlapped_s` the rest; None on an accelerator,
    where an operator's recorded time is that of its launch. `waiting_s` is the part spent waiting for the last
    rank of each group to start (matched by group and sequence); None where another rank's record is missing.
    """

    bytes: int
    num_calls: int
    num_unfinished: int  # whose end was not seen: their time counts nowhere
    time_s: float | None
    exposed_s: float | None
    overlapped_s: float | None
    waiting_s: float | None
    operations: tuple[OperationBandwidth, ...]  # most bytes first


def communication(rank: RankRun, matched: Mapping[Key, Matched]) -> Communication | None:
    """Analyse one rank's collectives, `matched` with the other ranks'. None when no step was traced."""
    if rank.traced_step is None:
        return None
    own = traced_collectives(rank)
    busy = union((call.issue_s, call.end_s) for call in own if call.end_s is not None)
    time_s = None if own and all(call.end_s is None for call in own) else length(busy)
    exposed_s = None
    if time_s is not None and (rank.process.device == "cpu" or not own):
        exposed_s = length(minus(busy, compute_intervals(rank)))
    return Communication(
        bytes=sum(call.size_bytes for call in own),
        num_calls=len(own),
        num_unfinished=sum(call.end_s is None for call in own),
        time_s=time_s,
        exposed_s=exposed_s,
        overlapped_s=None if time_s is None or exposed_s is None else time_s - exposed_s,
        waiting_s=_waiting_s(rank, own, matched),
        operations=_operations(rank.process.rank, own, matched),
    )


def compute_intervals(rank: RankRun) -> Intervals:
    """When operators other than collectives themselves ran, in the traced step."""
    return union((o.start_s, o.end_s) for o in rank.operators if not o.name.startswith(_COLLECTIVE_OPERATORS))


def _waiting_s(rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched]) -> float | None:
    """Moments in which at least one of the rank's collectives had not been started by all others."""
    keys = [key_of(call, rank.process.rank) for call in own]
    if any(key not in matched for key in keys):
        return None
    found = [matched[key] for key in keys]
    return length(union((match.issue_s[rank.process.rank], match.last_start_s) for match in found))


def _operations(
    rank: int, own: Sequence[Collective], matched: Mapping[Key, Matched]
) -> tuple[OperationBandwidth, ...]:
    groups: dict[tuple[str, int, int], list[Collective]] = defaultdict(list)
    for call in own:
        groups[call.operation, call.size_bytes, call.group_size].append(call)
    rows = [
        _bandwidth(*kind, [matched.get(key_of(call, rank)) for call in calls])
        for kind, calls in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.size_bytes * row.num_calls))


def _bandwidth(
    operation: str, size_bytes: int, group_size: int, matches: Sequence[Matched | None]
) -> OperationBandwidth:
    durations = [
        match.end_s - match.last_start_s for match in matches if match is not None and match.end_s is not None
    ]
    duration_s = median(durations) if durations else None
    is_known = duration_s is not None and duration_s > 0 and size_bytes > 0
    algorithm = size_bytes / duration_s if is_known and duration_s else None
    return OperationBandwidth(
        operation=operation,
        size_bytes=size_bytes,
        group_size=group_size,
        num_calls=len(matches),
        duration_s=duration_s,
        algorithm_bytes_per_s=algorithm,
        bus_bytes_per_s=None if algorithm is None else algorithm * bus_factor(operation, group_size),
    )


def bus_factor(operation: str, num_ranks: int) -> float:
    """Bus over algorithm bandwidth, from nccl-tests, doc/PERFORMANCE.md."""
    if operation == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0
