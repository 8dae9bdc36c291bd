"""What a predicted step time is made of, and what runs on this machine have taught about each part."""

from __future__ import annotations

from collections.abc import Mapping

from memadvisor.cost.lanes import Lanes

# compute: forwards, backwards and what is outside of both; recomputation: second forwards; optimizer: updates, in the
# backward too; exposed_communication: compute waits for collectives; overlap_slowdown: it is slower for those under it;
# exposed_transfer: it waits for other tiers.
COMPONENTS = (
    "compute",
    "recomputation",
    "optimizer",
    "exposed_communication",
    "overlap_slowdown",
    "exposed_transfer",
)
# The first words of the simulator's labels of compute (simulate.py, paged_updates.py) that are not plain compute.
_KINDS = {
    "recomputation": "recomputation",
    **dict.fromkeys(("optimizer", "update", "prefetch", "offload"), "optimizer"),
}


def components_of(lanes: Lanes) -> dict[str, float]:
    """Seconds by component; they sum to when compute is free again. None is below 0, where differences of times may round."""
    found = dict.fromkeys(COMPONENTS, 0.0)
    for kind, seconds in lanes.alone_s.items():
        found[_KINDS.get(kind, "compute")] += seconds
    found["exposed_communication"] = lanes.exposed_s
    found["overlap_slowdown"] = lanes.slowed_s
    found["exposed_transfer"] = lanes.exposed_transfer_s
    return {name: max(0.0, seconds) for name, seconds in found.items()}


def scaled(lanes: Lanes, factors: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Step time and components, each times its factor; 1 for what has none."""
    components_s = components_of(lanes)
    if not factors:
        return lanes.compute_s, components_s
    components_s = {name: seconds * factors.get(name, 1.0) for name, seconds in components_s.items()}
    return sum(components_s.values()), components_s
