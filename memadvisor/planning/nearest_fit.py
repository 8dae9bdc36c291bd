"""Where no layout is safe: the one that needs least memory, how much is missing, and what would make room."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memadvisor.cost.layouts.chance import chance_of_more
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.planning.layout_space import LayoutQuestion
from memadvisor.planning.layouts import search_layouts
from memadvisor.planning.priced_layouts import Priced
from memadvisor.planning.what_if import twice_the_nodes

# So many times the nodes are tried.
_MOST_TIMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestFit:
    """All predicted. `smallest`: of all layouts the one that needs least. `total_bytes`: of its fullest device, the driver's
    share with it. `safe_memory_bytes`: an accelerator's memory with which it would be safe. `num_accelerators`: the fewest, of
    2, 4 and 8 times the nodes, for which some layout is safe, `larger` the fastest of these; None where none is, or where
    the network between nodes is not known. `may_offload`: the optimizer's state on the host was searched too.
    """

    smallest: Priced
    total_bytes: float
    safe_memory_bytes: int
    num_accelerators: int | None
    larger: Priced | None
    may_offload: bool


def nearest_fit(question: LayoutQuestion, smallest: Priced) -> NearestFit:
    """`smallest`: as the search found it."""
    worst = smallest.estimate.worst
    number, larger = _more_nodes(question)
    return NearestFit(
        smallest=smallest,
        total_bytes=worst.total_bytes,
        safe_memory_bytes=_safe_memory_bytes(question, smallest),
        num_accelerators=number,
        larger=larger,
        may_offload=question.offload and question.cluster.host is not None,
    )


def _safe_memory_bytes(question: LayoutQuestion, smallest: Priced) -> int:
    """By bisection: the more memory, the less likely more is needed."""
    worst = {
        id(one): one for one in (smallest.estimate.worst, smallest.estimate.first, smallest.estimate.last)
    }

    def is_safe(memory_bytes: int) -> bool:
        return all(chance_of_more(one, memory_bytes, FITTED) < question.max_p_oom for one in worst.values())

    low, high = 0, 2**20
    while not is_safe(high):
        low, high = high, 2 * high
    while high - low > 2**20:
        middle = (low + high) // 2
        low, high = (low, middle) if is_safe(middle) else (middle, high)
    return high


def _more_nodes(question: LayoutQuestion) -> tuple[int | None, Priced | None]:
    cluster, times = question.cluster, 1
    while times < _MOST_TIMES:
        change, times = twice_the_nodes(cluster), 2 * times
        if change.cluster is None:
            break
        cluster = change.cluster
        best = search_layouts(replace(question, cluster=cluster), num_best=1, front_slowdown=1.0).best
        if best:
            return cluster.num_accelerators, best[0]
    return None, None
