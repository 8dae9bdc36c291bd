"""The records that the several ranks of one operation made of it, put side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memadvisor.run.records import Collective
from memadvisor.run.run import RankRun

Key = tuple[str, str, int]  # operation, group (with direction and tag for a send), sequence
SEND_RECV = "send/recv"


def traced_collectives(rank: RankRun) -> tuple[Collective, ...]:
    """The collectives of the traced step."""
    step = rank.traced_step
    return tuple(call for call in rank.collectives if step is not None and call.step == step.index)


def started_s(call: Collective) -> float:
    """When the operation could begin: the device's own time where the device runs it, else its issue."""
    return call.issue_s if call.device_start_s is None else call.device_start_s


def key_of(call: Collective, rank: int) -> Key:
    """What names an operation on all its ranks; `rank` is whose record it is."""
    if call.operation not in ("send", "recv"):
        return call.operation, call.group, call.sequence
    # A send and its receive are two sides of one operation: the n-th from one rank to another under one tag.
    source, target = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
    return SEND_RECV, f"{call.group} {source}->{target} tag {call.tag}", call.sequence


def sides_of_operations(ranks: Sequence[RankRun]) -> dict[Key, Mapping[int, Collective]]:
    """By rank, what each recorded of an operation of the traced step that all its ranks recorded."""
    sides: dict[Key, dict[int, Collective]] = {}
    for rank in ranks:
        for call in traced_collectives(rank):
            sides.setdefault(key_of(call, rank.process.rank), {})[rank.process.rank] = call
    return {key: by_rank for key, by_rank in sides.items() if len(by_rank) == _num_sides(key, by_rank)}


def _num_sides(key: Key, by_rank: Mapping[int, Collective]) -> int:
    return 2 if key[0] == SEND_RECV else next(iter(by_rank.values())).group_size
