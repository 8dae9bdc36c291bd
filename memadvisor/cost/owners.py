"""Which rank takes which whole parameter, so that no rank has much more to hold or to compute than the others.

LPT (longest processing time first; Graham, SIAM J. Appl. Math. 17(2), 1969): the costliest parameter that is left
goes to the rank that is least loaded. With one kind of cost the largest load is at most 4/3 - 1/(3n) of the best
possible. A rank's load is here the larger of its share of all bytes and its share of all work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What a parameter costs the rank that owns it; `work` in any unit that is the same for all."""

    size_bytes: float
    work: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.size_bytes + other.size_bytes, self.work + other.work)


def share_out(costs: Sequence[Cost], num_ranks: int, loads: Sequence[Cost] = ()) -> list[int]:
    """The owner of each parameter; the same on every rank that asks with the same costs.

    loads: what the ranks have already, nothing where none is given.
    """
    taken = list(loads) or [Cost(0, 0)] * num_ranks
    total = sum((*costs, *taken), Cost(0, 0))

    def shares(cost: Cost) -> tuple[float, float]:
        return cost.size_bytes / (total.size_bytes or 1), cost.work / (total.work or 1)

    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-max(shares(costs[index])), index)):

        def load_with(rank: int, cost: Cost = costs[index]) -> tuple[float, float, int]:
            bytes_share, work_share = shares(taken[rank] + cost)
            return max(bytes_share, work_share), bytes_share + work_share, rank

        owner = min(range(num_ranks), key=load_with)
        owners[index] = owner
        taken[owner] += costs[index]
    return owners
