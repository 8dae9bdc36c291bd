"""How much of what a step updates is this rank's, and how large the largest piece of it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction

from memadvisor.cost.owners import Owned
from memadvisor.cost.step import UnitStates


def largest_piece_share(
    states: Mapping[str, UnitStates],
    chosen: Collection[str],
    stages: Mapping[str, int],
    num_ranks: int,
    widening: Callable[[str], Fraction],
) -> float:
    """The largest piece of `chosen` units that a rank updates at once, as a fraction of the largest parameter of all."""
    whole, piece = 1, Fraction(1)
    for name, stage in stages.items():
        parameters = states[name].parameters
        shard = -(-sum(p.num_elements for p in parameters if p.requires_grad) // num_ranks)
        wholes = {update.parameter.name for update in states[name].whole_updates}
        for parameter in parameters:
            if parameter.requires_grad:
                count = parameter.num_elements
                whole = max(whole, count)
                in_pieces = stage and parameter.name not in wholes
                if name in chosen:
                    piece = max(piece, (min(count, shard) if in_pieces else count) * widening(name))
    return float(piece / whole)


def updated_share(
    states: Mapping[str, UnitStates],
    names: Iterable[str],
    stages: Mapping[str, int],
    num_ranks: int,
    owned: Mapping[str, Owned],
) -> float:
    """Elements of these units that a rank updates, as a fraction of those of all units."""
    sizes = {name: states[name].trainable_bytes for name in stages}
    total, own = sum(sizes.values()), 0.0
    for name in names:
        if not stages[name]:
            own += sizes[name]
            continue
        wholes = sum(update.parameter.size_bytes for update in states[name].whole_updates)
        own += (sizes[name] - wholes) / num_ranks + owned.get(name, Owned()).parameter_bytes
    return own / total if total else 1.0
