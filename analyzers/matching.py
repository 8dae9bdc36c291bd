"""One collective as its several ranks saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memadvisor.run.records import Collective
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True)
class Matched:
    """One collective as all ranks of its group saw it, on one clock. `last_rank` started it last."""

    issue_s: dict[int, float]  # by rank
    last_start_s: float
    last_rank: int
    end_s: float | None  # when the last rank had its result


Key = tuple[str, str, int]  # operation, group (with direction and tag for a send), sequence
SEND_RECV = "send/recv"


def traced_collectives(rank: RankRun) -> tuple[Collective, ...]:
    """The collectives of the traced step."""
    step = rank.traced_step
    return tuple(call for call in rank.collectives if step is not None and call.step == step.index)


def match_collectives(ranks: Sequence[RankRun]) -> dict[Key, Matched]:
    """Collectives of the traced step that every rank of the group recorded, by group and sequence.

    Processes of one machine share the monotonic clock; of several, their wall clocks are compared, which
    are no better than their synchronisation.
    """
    shares_clock = len({rank.process.host for rank in ranks}) == 1
    calls: dict[Key, dict[int, tuple[Collective, float]]] = {}
    for rank in ranks:
        offset_s = 0.0 if shares_clock else rank.process.unix_offset_s
        for call in traced_collectives(rank):
            same = calls.setdefault(key_of(call, rank.process.rank), {})
            same[rank.process.rank] = (call, offset_s)
    return {key: _match(by_rank) for key, by_rank in calls.items() if len(by_rank) == num_sides(key, by_rank)}


def num_sides(key: Key, by_rank: Mapping[int, tuple[Collective, float]]) -> int:
    """How many ranks take part in an operation."""
    return 2 if key[0] == SEND_RECV else next(iter(by_rank.values()))[0].group_size


def key_of(call: Collective, rank: int) -> Key:
    """What names an operation on all its ranks; `rank` is whose record it is."""
    if call.operation not in ("send", "recv"):
        return call.operation, call.group, call.sequence
    # A send and its receive are two sides of one operation: the n-th from one rank to another under one tag.
    source, target = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
    return SEND_RECV, f"{call.group} {source}->{target} tag {call.tag}", call.sequence


def _match(by_rank: dict[int, tuple[Collective, float]]) -> Matched:
    issue_s = {rank: call.issue_s + offset_s for rank, (call, offset_s) in by_rank.items()}
    ends_s = [call.end_s + offset_s for call, offset_s in by_rank.values() if call.end_s is not None]
    last_rank = max(issue_s, key=lambda rank: issue_s[rank])
    return Matched(
        issue_s=issue_s,
        last_start_s=issue_s[last_rank],
        last_rank=last_rank,
        end_s=max(ends_s) if len(ends_s) == len(by_rank) else None,
    )
