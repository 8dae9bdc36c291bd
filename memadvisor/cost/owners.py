"""Which rank takes which whole parameter, so that no rank has much more to hold or to compute than the others.

LPT (longest processing time first; Graham, SIAM J. Appl. Math. 17(2), 1969): the costliest parameter that is left
goes to the rank that is least loaded. With one kind of cost the largest load is at most 4/3 - 1/(3n) of the best
possible. A rank's load is here the larger of its share of all bytes and its share of all work.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memadvisor.cost.states import UnitStates, WholeUpdate

# Classes of torch.optim that update each element by that element alone: on pieces, nobody owns a whole.
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)
# State with one number for a whole parameter; everything else has the parameter's shape.
SCALARS = ("step", "eta", "mu", "mu_product")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a parameter costs the rank that owns it; `work` in any unit that is the same for all."""

    size_bytes: float
    work: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.size_bytes + other.size_bytes, self.work + other.work)


def is_elementwise(optimizer: str) -> bool:
    """By the name of the class, `torch.optim.adamw.AdamW`."""
    module, _, name = optimizer.rpartition(".")
    return module.startswith("torch.optim") and name in ELEMENTWISE


def cost_of(shape: Sequence[int], size_bytes: int, *, newton_schulz: bool) -> Cost:
    """A parameter's bytes, and its elements for work; with Muon's Newton-Schulz the FLOPs of one iteration.

    That is X X^T of a matrix of m <= n, its square, and that times X.
    """
    if newton_schulz and len(shape) == 2:
        m, n = sorted(shape)
        return Cost(size_bytes, 4.0 * m * m * n + 2.0 * m**3)
    numel = 1
    for size in shape:
        numel *= size
    return Cost(size_bytes, numel)


@dataclass(frozen=True, slots=True)
class Owned:
    """What the rank with most owns of a unit: bytes of parameters (of gradients as many), and of state."""

    parameter_bytes: int = 0
    state_bytes: int = 0


def largest_share(
    units: Mapping[str, UnitStates], sharded: Collection[str], num_ranks: int
) -> dict[str, Owned]:
    """Of each unit in `sharded`, what is owned by the rank that holds most in all."""
    by_optimizer: dict[str, list[tuple[str, WholeUpdate]]] = {}
    for name in sharded:
        for update in units[name].whole_updates if name in units else ():
            by_optimizer.setdefault(update.optimizer, []).append((name, update))
    held: list[dict[str, Owned]] = [{} for _ in range(num_ranks)]
    for optimizer, updates in by_optimizer.items():
        is_muon = optimizer.startswith("torch.optim.") and optimizer.endswith(".Muon")
        costs = [
            cost_of(_sizes(update.parameter.shape), update.parameter.size_bytes, newton_schulz=is_muon)
            for _, update in updates
        ]
        for (name, update), owner in zip(updates, share_out(costs, num_ranks), strict=True):
            before = held[owner].get(name, Owned())
            held[owner][name] = Owned(
                before.parameter_bytes + update.parameter.size_bytes, before.state_bytes + update.state_bytes
            )
    return max(held, key=lambda owned: sum(o.parameter_bytes + o.state_bytes for o in owned.values()))


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in re.findall("[0-9]+", shape)]


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
