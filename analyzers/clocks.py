"""How far the ranks' clocks are apart, told by the collectives themselves.

Rank i reads t + o_i where the first rank reads t. Of an operation in which every rank needs every other (an
all_reduce, a barrier) no rank has its result before all have issued it, so for every pair

    end_i - o_i >= issue_j - o_j,   that is   o_i - o_j <= end_i - issue_j.

The least of these over all operations are bounds on differences; the shortest paths through them are the
tightest bounds that follow (Cormen et al., Introduction to Algorithms, section 24.4), and a negative cycle
means that no clocks explain the records. Inside the bounds the estimate rests on the other thing that such
operations have: all ranks get their results at nearly the same moment, however late one of them came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from memadvisor.analyzers.sides import SEND_RECV, sides_of_operations, started_s
from memadvisor.run.records import Collective
from memadvisor.run.run import RankRun

# Operations whose result needs all ranks; a receive needs its sender alone.
_MEETINGS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
# Clocks of one machine are one; what contradicts that by less is the noise of taking the time.
_NOISE_S = 1e-3
_NUM_BEST = 9  # the shortest meetings of a pair, whose ends lie closest together


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """`offset_s` is what a rank's monotonic clock is ahead of the first rank's.

    `source`: "shared" (one machine has one clock), "collectives" (estimated; `uncertainty_s` is the median distance
    of the single estimates from it, and the true offset lies in `bounds_s` for certain), or "wall clocks" (as
    well as the machines keep theirs: no meeting of the ranks was recorded). `contradicted`: no clocks explain
    the records, so nothing that compares this rank with others is worth much.
    """

    rank: int
    offset_s: float
    source: str
    uncertainty_s: float | None = None
    bounds_s: tuple[float, float] | None = None
    contradicted: bool = False


def align_clocks(ranks: Sequence[RankRun]) -> tuple[RankClock, ...]:
    """One clock a rank, in the ranks' order; the first rank's is the axis."""
    if not ranks:
        return ()
    first = ranks[0]
    meetings = _meetings(ranks)
    bounds = _tightest(_bounds(ranks, meetings), [rank.process.rank for rank in ranks])
    clocks = [RankClock(rank=first.process.rank, offset_s=0.0, source="shared")]
    return (*clocks, *(_clock_of(first, rank, meetings, bounds) for rank in ranks[1:]))


Meeting = Mapping[int, Collective]
Bounds = Mapping[tuple[int, int], float]  # (i, j): o_i - o_j is at most this


def _clock_of(first: RankRun, rank: RankRun, meetings: Sequence[Meeting], bounds: Bounds) -> RankClock:
    zero, own = first.process.rank, rank.process.rank
    high, low = bounds[own, zero], -bounds[zero, own]
    is_contradicted = low > high + _NOISE_S or bounds[own, own] < -_NOISE_S
    if first.process.host == rank.process.host and low - _NOISE_S <= 0 <= high + _NOISE_S:
        return RankClock(rank=own, offset_s=0.0, source="shared", contradicted=is_contradicted)
    apart = _differences_of_ends(zero, own, meetings)
    if not apart:
        wall_s = first.process.unix_offset_s - rank.process.unix_offset_s
        return RankClock(rank=own, offset_s=wall_s, source="wall clocks", contradicted=is_contradicted)
    estimate_s = median(apart)
    return RankClock(
        rank=own,
        offset_s=estimate_s if is_contradicted else min(max(estimate_s, low), high),
        source="collectives",
        uncertainty_s=median(abs(value - estimate_s) for value in apart),
        bounds_s=None if is_contradicted or high == inf or low == -inf else (low, high),
        contradicted=is_contradicted,
    )


def _meetings(ranks: Sequence[RankRun]) -> list[Meeting]:
    """Operations of which every side has an end, sends and receives among them."""
    return [
        sides
        for key, sides in sides_of_operations(ranks).items()
        if (key[0] in _MEETINGS or key[0] == SEND_RECV) and all(c.end_s is not None for c in sides.values())
    ]


def _bounds(ranks: Sequence[RankRun], meetings: Sequence[Meeting]) -> dict[tuple[int, int], float]:
    bounds: dict[tuple[int, int], float] = {}
    for sides in meetings:
        for i, ended in sides.items():
            for j, issued in sides.items():
                # A sender is done when its message is on its way: it tells nothing of the receiver.
                if i != j and ended.end_s is not None and ended.operation != "send":
                    bounds[i, j] = min(bounds.get((i, j), inf), ended.end_s - started_s(issued))
    return bounds


def _tightest(bounds: Mapping[tuple[int, int], float], ranks: Sequence[int]) -> dict[tuple[int, int], float]:
    """Shortest paths between all pairs (Floyd and Warshall); a rank's own entry is negative on a contradiction."""
    best = {(i, j): 0.0 if i == j else bounds.get((i, j), inf) for i in ranks for j in ranks}
    for middle in ranks:
        for i in ranks:
            if best[i, middle] == inf:
                continue
            for j in ranks:
                best[i, j] = min(best[i, j], best[i, middle] + best[middle, j])
    return best


def _differences_of_ends(zero: int, own: int, meetings: Sequence[Meeting]) -> list[float]:
    """End on `own` less end on `zero`, of the meetings of both that went fastest once all were there."""
    found = []
    for sides in meetings:
        one, other = sides.get(zero), sides.get(own)
        if one is None or other is None or one.operation in ("send", "recv"):
            continue
        if one.end_s is not None and other.end_s is not None:
            # Whoever came last waited for nobody: its own duration is that of the operation alone.
            duration_s = min(c.end_s - started_s(c) for c in sides.values() if c.end_s is not None)
            found.append((duration_s, other.end_s - one.end_s))
    return [difference_s for _, difference_s in sorted(found)[:_NUM_BEST]]
