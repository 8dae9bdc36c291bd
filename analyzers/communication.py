"""What communication costs: bytes, time, how much of it hides behind compute, who waits for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from memadvisor.analyzers.intervals import Intervals, length, minus, union
from memadvisor.analyzers.matching import Matched
from memadvisor.analyzers.sides import Key, key_of, started_s, traced_collectives
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
class TrafficShare:
    """The collectives of one unit or one group, with the definitions of `Communication`.

    Of collectives in flight together each counts its whole time, so the shares may sum to more than the whole.
    `transfer_s` is the time from the last rank's start to the end: what is left when nobody waits for anybody.
    """

    name: str
    bytes: int
    num_calls: int
    time_s: float | None
    exposed_s: float | None
    waiting_s: float | None
    transfer_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One rank's collectives in the traced step, so its times carry the tracing's own cost.

    `time_s` is the length of the union of [issue, end) of all collectives; None where no end was seen. What a rank
    waited because another began the traced step later than it did, as starting to trace makes it, is left out.
    `exposed_s` is the part of it in which no operator ran, `overlapped_s` the rest; None on an accelerator,
    where an operator's recorded time is that of its launch. `waiting_s` is the part spent waiting for the last
    rank of each group to start (matched by group and sequence), `transfer_s` the part from then to the end;
    None where another rank's record is missing. `exposed_fraction` is `exposed_s` over the traced step's own time,
    `late_fraction` that part of it which waited for the last rank to start, `update_fraction` that inside the optimizer.
    `groups` are by process group, `units` by the unit that called.
    """

    bytes: int
    num_calls: int
    num_unfinished: int  # whose end was not seen: their time counts nowhere
    time_s: float | None
    exposed_s: float | None
    exposed_fraction: float | None
    late_fraction: float | None
    update_fraction: float | None
    overlapped_s: float | None
    waiting_s: float | None
    transfer_s: float | None
    operations: tuple[OperationBandwidth, ...]  # most bytes first
    groups: tuple[TrafficShare, ...]  # longest first
    units: tuple[TrafficShare, ...]


def communication(rank: RankRun, matched: Mapping[Key, Matched]) -> Communication | None:
    """Analyse one rank's collectives, `matched` with the other ranks'. None when no step was traced, or its record is lost."""
    step = rank.traced_step
    if step is None or (rank.has_lost_trace and not rank.collectives):
        return None
    own = traced_collectives(rank)
    compute = compute_intervals(rank)
    whole = _share("", rank, own, matched, compute)
    step_s = step.duration_s - _head_start_s(rank, own, matched)
    return Communication(
        bytes=whole.bytes,
        num_calls=whole.num_calls,
        num_unfinished=sum(call.end_s is None for call in own),
        time_s=whole.time_s,
        exposed_s=whole.exposed_s,
        exposed_fraction=_fraction(whole.exposed_s, step_s),
        late_fraction=None
        if whole.exposed_s is None
        else _fraction(_exposed_waiting_s(rank, own, matched, compute), step_s),
        update_fraction=None
        if whole.exposed_s is None
        else _fraction(_exposed_in_updates_s(rank, own, matched, compute), step_s),
        overlapped_s=None
        if whole.time_s is None or whole.exposed_s is None
        else whole.time_s - whole.exposed_s,
        waiting_s=whole.waiting_s,
        transfer_s=whole.transfer_s,
        operations=_operations(rank.process.rank, own, matched),
        groups=_shares(rank, own, matched, compute, lambda call: call.group),
        units=_shares(rank, own, matched, compute, lambda call: call.unit),
    )


def _fraction(seconds: float | None, of_s: float) -> float | None:
    return None if seconds is None or of_s <= 0 else min(1.0, seconds / of_s)


def _shares(
    rank: RankRun,
    own: Sequence[Collective],
    matched: Mapping[Key, Matched],
    compute: Intervals,
    name_of: Callable[[Collective], str],
) -> tuple[TrafficShare, ...]:
    calls: dict[str, list[Collective]] = defaultdict(list)
    for call in own:
        calls[name_of(call)].append(call)
    shares = [_share(name, rank, members, matched, compute) for name, members in calls.items()]
    return tuple(sorted(shares, key=lambda share: -(share.time_s or 0.0)))


def _share(
    name: str, rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched], compute: Intervals
) -> TrafficShare:
    busy = _busy(rank, own, matched)
    time_s = None if own and all(call.end_s is None for call in own) else length(busy)
    is_exposed_known = time_s is not None and (rank.process.device == "cpu" or not own)
    return TrafficShare(
        name=name,
        bytes=sum(call.size_bytes for call in own),
        num_calls=len(own),
        time_s=time_s,
        exposed_s=length(minus(busy, compute)) if is_exposed_known else None,
        waiting_s=_waiting_s(rank, own, matched),
        transfer_s=_transfer_s(rank, own, matched),
    )


def _busy(rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched]) -> Intervals:
    return union((_began_s(rank, call, matched), call.end_s) for call in own if call.end_s is not None)


def _began_s(rank: RankRun, call: Collective, matched: Mapping[Key, Matched]) -> float:
    """When an operation could begin, had the ranks begun the traced step together."""
    number, began_s = rank.process.rank, started_s(call)
    match = matched.get(key_of(call, number))
    if match is None or match.end_s is None or call.end_s is None or not match.head_start_s.get(number):
        return began_s
    return max(began_s, call.end_s - (match.end_s - match.issue_s[number]))


def _head_start_s(rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched]) -> float:
    """How much earlier than the last rank this one began the traced step, if it had to wait for that."""
    number = rank.process.rank
    found = [matched[key] for call in own if (key := key_of(call, number)) in matched]
    return max((match.head_start_s.get(number, 0.0) for match in found), default=0.0)


def compute_intervals(rank: RankRun) -> Intervals:
    """When operators other than collectives themselves ran, in the traced step."""
    return union((o.start_s, o.end_s) for o in rank.operators if not o.name.startswith(_COLLECTIVE_OPERATORS))


def _waiting_s(rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched]) -> float | None:
    """Moments in which at least one of the rank's collectives had not been started by all others."""
    found = _matches(rank, own, matched)
    if found is None:
        return None
    return length(union((match.issue_s[rank.process.rank], match.last_start_s) for match in found))


def _exposed_waiting_s(
    rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched], compute: Intervals
) -> float | None:
    """Moments of waiting, on the rank's own clock, in which it ran no operator."""
    found = _matches(rank, own, matched)
    if found is None:
        return None
    waits = []
    for call, match in zip(own, found, strict=True):
        began_s = _began_s(rank, call, matched)
        until_s = began_s + match.last_start_s - match.issue_s[rank.process.rank]
        waits.append((began_s, until_s if call.end_s is None else min(until_s, call.end_s)))
    return length(minus(union(waits), compute))


def _exposed_in_updates_s(
    rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched], compute: Intervals
) -> float:
    exposed = minus(_busy(rank, own, matched), compute)
    step = rank.traced_step
    updates = union(
        (span.start_s, span.end_s)
        for span in rank.spans
        if step is not None and span.kind == "optimizer" and span.step == step.index
    )
    return length(exposed) - length(minus(exposed, updates))


def _transfer_s(rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched]) -> float | None:
    """Moments in which at least one of the rank's collectives had been started by all, and had not ended."""
    found = _matches(rank, own, matched)
    if found is None or any(match.end_s is None for match in found):
        return None
    return length(union((match.last_start_s, match.end_s) for match in found if match.end_s is not None))


def _matches(
    rank: RankRun, own: Sequence[Collective], matched: Mapping[Key, Matched]
) -> list[Matched] | None:
    """What all ranks saw of these calls; None where the record of one is missing."""
    keys = [key_of(call, rank.process.rank) for call in own]
    return [matched[key] for key in keys] if all(key in matched for key in keys) else None


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
