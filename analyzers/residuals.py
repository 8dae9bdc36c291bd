"""What the parts of a step took, in the words of a prediction: what is left between the two is a residual."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from memadvisor.analyzers.communication import Communication
from memadvisor.analyzers.step_time import StepTime

# Components of a prediction that a run does not tell from compute: what overlap slows, and what other tiers hold up.
_IN_COMPUTE = ("overlap_slowdown", "exposed_transfer")


def measured_components(
    time: StepTime, traffic: Communication | None, recomputed: Collection[str], *, has_parts: bool = False
) -> dict[str, float | None]:
    """Seconds of the median timed step by component, which sum to it.

    optimizer: its phase, without the communication that is exposed in it. recomputation: second forwards of the units that
    the plan recomputes; those of the script's own checkpoints were in the run that it was worked out from, and are predicted
    as compute; None where the plan has parts of units run again, which nothing tells from the backward around them.
    exposed_communication: its share of the traced step, in which alone collectives are seen; None where it was not recorded,
    and then it is in compute. compute: the rest.
    """
    exposed_s, optimizer_s = None, time.by_phase_s["optimizer"]
    if traffic is not None and traffic.exposed_fraction is not None:
        exposed_s = time.median_s * traffic.exposed_fraction
        optimizer_s = max(0.0, optimizer_s - time.median_s * (traffic.update_fraction or 0.0))
    again_s = None if has_parts else sum(unit.recompute_s for unit in time.units if unit.unit in recomputed)
    rest_s = time.median_s - optimizer_s - (again_s or 0.0) - (exposed_s or 0.0)
    return {
        "compute": rest_s,
        "recomputation": again_s,
        "optimizer": optimizer_s,
        "exposed_communication": exposed_s,
    }


def comparable(components_s: Mapping[str, float], *, has_parts: bool = False) -> dict[str, float]:
    """A prediction's components as a run tells them apart."""
    inside = {*_IN_COMPUTE, *(("recomputation",) if has_parts else ())}
    found = {name: seconds for name, seconds in components_s.items() if name not in inside}
    found["compute"] = found.get("compute", 0.0) + sum(components_s.get(name, 0.0) for name in inside)
    return found
