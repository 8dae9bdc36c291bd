"""One collective as its several ranks saw it, on one clock.

Starting to trace takes each rank another moment, which is no part of the training; the ranks begin the traced
step apart by that. Until the first collective of the step has ended no rank can have waited for another, so up
to there times are told as if all had begun together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from memadvisor.analyzers.clocks import RankClock, align_clocks
from memadvisor.analyzers.sides import Key, sides_of_operations, started_s
from memadvisor.run.records import Collective
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True)
class Matched:
    """One collective as all ranks of its group saw it, on the first rank's clock. `last_rank` started it last.

    `end_s` less `last_start_s` is as measured; what was issued before the step's first collective had ended is
    later than measured by what its rank began the traced step before the last one (`head_start_s`, by rank).
    """

    issue_s: dict[int, float]  # by rank
    last_start_s: float
    last_rank: int
    end_s: float | None  # when the last rank had its result
    head_start_s: dict[int, float] = field(default_factory=dict)


def match_collectives(
    ranks: Sequence[RankRun], clocks: Sequence[RankClock] | None = None
) -> dict[Key, Matched]:
    """Collectives of the traced step that every rank of the group recorded; `clocks` are `align_clocks`'s."""
    found = align_clocks(ranks) if clocks is None else clocks
    offsets_s = {clock.rank: clock.offset_s for clock in found}
    operations = sides_of_operations(ranks)
    head_starts = _HeadStarts(ranks, offsets_s, operations.values())
    return {key: _match(by_rank, offsets_s, head_starts) for key, by_rank in operations.items()}


class _HeadStarts:
    """How much earlier than the last rank each began the traced step, and until when that shows."""

    def __init__(
        self,
        ranks: Sequence[RankRun],
        offsets_s: Mapping[int, float],
        operations: Iterable[Mapping[int, Collective]],
    ) -> None:
        begins_s = {
            rank.process.rank: rank.traced_step.start_s - offsets_s[rank.process.rank]
            for rank in ranks
            if rank.traced_step is not None
        }
        last_s = max(begins_s.values(), default=0.0)
        self._seconds = {rank: last_s - begin_s for rank, begin_s in begins_s.items()}
        self._until_s = min(
            (
                min(call.end_s - offsets_s[rank] for rank, call in sides.items() if call.end_s is not None)
                for sides in operations
                if len(sides) > 1 and all(call.end_s is not None for call in sides.values())
            ),
            default=inf,
        )

    def of(self, rank: int, issue_s: float) -> float:
        return self._seconds.get(rank, 0.0) if issue_s < self._until_s else 0.0


def _match(
    by_rank: Mapping[int, Collective], offsets_s: Mapping[int, float], head_starts: _HeadStarts
) -> Matched:
    measured_s = {rank: started_s(call) - offsets_s[rank] for rank, call in by_rank.items()}
    head_start_s = {rank: head_starts.of(rank, moment_s) for rank, moment_s in measured_s.items()}
    issue_s = {rank: moment_s + head_start_s[rank] for rank, moment_s in measured_s.items()}
    ends_s = [call.end_s - offsets_s[rank] for rank, call in by_rank.items() if call.end_s is not None]
    last_rank = max(issue_s, key=lambda rank: issue_s[rank])
    transfer_s = max(ends_s) - max(measured_s.values()) if len(ends_s) == len(by_rank) else None
    return Matched(
        issue_s=issue_s,
        last_start_s=issue_s[last_rank],
        last_rank=last_rank,
        end_s=None if transfer_s is None else issue_s[last_rank] + transfer_s,
        head_start_s=head_start_s,
    )
