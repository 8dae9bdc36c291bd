"""What stage 1 casts of gradients for an optimizer that updates masters in a wider dtype (engines/sharded_step.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from memadvisor.cost.states import UnitSizes


def widened_gradients(
    sizes: Mapping[str, UnitSizes], stages: Mapping[str, int], fetched: Collection[str]
) -> dict[str, int]:
    """Bytes beside the whole gradients while the optimizer steps, by unit: this rank's pieces in the masters' dtype.

    Units whose state is `fetched` are updated one after another, before all others at once.
    """
    found = {name: each.master_bytes for name, each in sizes.items() if stages[name] == 1}
    rest = {name: size for name, size in found.items() if size and name not in fetched}
    alone = max((name for name in found if name in fetched), key=found.__getitem__, default=None)
    if alone is None or found[alone] <= sum(rest.values()):
        return rest
    return {alone: found[alone]}
