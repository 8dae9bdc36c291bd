"""One collective as its several ranks saw it, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memadvisor.analyzers.clocks import RankClock, align_clocks
from memadvisor.analyzers.sides import Key, sides_of_operations
from memadvisor.run.records import Collective
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True)
class Matched:
    """One collective as all ranks of its group saw it, on the first rank's clock. `last_rank` started it last."""

    issue_s: dict[int, float]  # by rank
    last_start_s: float
    last_rank: int
    end_s: float | None  # when the last rank had its result


def match_collectives(
    ranks: Sequence[RankRun], clocks: Sequence[RankClock] | None = None
) -> dict[Key, Matched]:
    """Collectives of the traced step that every rank of the group recorded; `clocks` are `align_clocks`'s."""
    found = align_clocks(ranks) if clocks is None else clocks
    offsets_s = {clock.rank: clock.offset_s for clock in found}
    return {key: _match(by_rank, offsets_s) for key, by_rank in sides_of_operations(ranks).items()}


def _match(by_rank: Mapping[int, Collective], offsets_s: Mapping[int, float]) -> Matched:
    issue_s = {rank: call.issue_s - offsets_s[rank] for rank, call in by_rank.items()}
    ends_s = [call.end_s - offsets_s[rank] for rank, call in by_rank.items() if call.end_s is not None]
    last_rank = max(issue_s, key=lambda rank: issue_s[rank])
    return Matched(
        issue_s=issue_s,
        last_start_s=issue_s[last_rank],
        last_rank=last_rank,
        end_s=max(ends_s) if len(ends_s) == len(by_rank) else None,
    )
