"""Ranks that wrote no ending: killed, hanging, still at it, or given up by the recorder; and when each was last heard of."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.run.run import RankRun, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRank:
    """`last_seen_unix_s` is the wall clock of the newest row that the rank has written, `behind_s` how long that was
    before the newest of any rank. A rank far behind the others died or hung first; they wait for it.

    `is_alive`: whether its process was there when the run was read; None where the reading machine cannot know.
    `has_stopped`: the recorder noted that it gave up, so that the record says nothing of how the process fares.
    """

    rank: int
    num_steps: int
    last_seen_unix_s: float
    behind_s: float
    is_alive: bool | None = None
    has_stopped: bool = False


def unfinished_ranks(run: Run) -> tuple[UnfinishedRank, ...]:
    """The readable ranks without an ending, in order."""
    seen_s = {rank.process.rank: _last_seen_unix_s(rank) for rank in run.ranks}
    newest_s = max(seen_s.values())
    return tuple(
        UnfinishedRank(
            rank=rank.process.rank,
            num_steps=len(rank.steps),
            last_seen_unix_s=seen_s[rank.process.rank],
            behind_s=newest_s - seen_s[rank.process.rank],
            is_alive=rank.is_alive,
            has_stopped=rank.has_stopped,
        )
        for rank in run.ranks
        if rank.ending is None
    )


def _last_seen_unix_s(rank: RankRun) -> float:
    times_s = [rank.process.start_s, *(step.end_s for step in rank.steps[-1:])]
    times_s += [sample.time_s for sample in rank.counters[-1:]]
    times_s += [note.time_s for note in rank.notes if note.time_s is not None]
    if rank.ending is not None:
        times_s.append(rank.ending.time_s)
    return max(times_s) + rank.process.unix_offset_s
