"""When plans may gather for the backward among near ranks, from second copies (hpZ, docs/engines/sharding.md)."""

from __future__ import annotations

from collections.abc import Iterable

from memadvisor.errors import UsageError
from memadvisor.planning.way import Way
from memadvisor.units import counted


def check_near_ranks(near_ranks: int | None, num_ranks: int, shards_itself: bool) -> None:
    """Raise UsageError for ranks of a node that cannot share a copy."""
    if near_ranks is None:
        return
    if not (2 <= near_ranks < num_ranks and num_ranks % near_ranks == 0):
        raise UsageError(
            f"--near-ranks {near_ranks} of {counted(num_ranks, 'rank')} cannot share second copies.",
            hint="it must be 2 or more, fewer than all ranks, and divide their number.",
        )
    if shards_itself:
        raise UsageError(
            "The script shards its model by FSDP2, which is told by the script alone among which ranks.",
            hint="advise without --near-ranks.",
        )


def grouped_ways(
    stage: int,
    kinds: Iterable[tuple[bool, int, int]],
    best: tuple[bool, int, int],
    groups: Iterable[int],
    near_ranks: int | None,
) -> list[Way]:
    """The best kind of a stage shared by groups of ranks; and each that gathers again, from second copies."""
    near = [
        Way(stage, *kind, secondary_ranks=near_ranks)
        for kind in kinds
        if near_ranks is not None and stage == 3 and kind[0]
    ]
    return [*(Way(stage, *best, ranks) for ranks in groups), *near]
