"""Where predicted times of collectives stand on messages that are far smaller than those of the plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.step import CapturedStep
from memadvisor.planning.ranked import RankedPlan
from memadvisor.units import format_bytes

_FAR = (
    8  # times as large as the largest that was observed: by then a small one's latency may pass for bandwidth
)


def extrapolation_notes(
    plans: Sequence[RankedPlan], step: CapturedStep, times: CollectiveTimes | None
) -> Iterator[str]:
    """Gathers of whole units beside what a fit has seen, as with frozen weights, whose gradients nobody reduces."""
    if times is None or times.largest_bytes is None:
        return
    gathered = {
        unit.name
        for ranked in plans
        for unit in ranked.plan.units
        if unit.zero_stage == 3 and unit.name in step.states
    }
    largest_bytes = max((step.states[name].parameter_bytes for name in gathered), default=0)
    if largest_bytes > _FAR * times.largest_bytes:
        yield (
            f"Plans gather up to {format_bytes(largest_bytes)} at once, and the run's own messages have "
            f"{format_bytes(times.largest_bytes)} at most: step times with ZeRO stage 3 may be far off, mostly too long. "
            f"`memadvisor calibrate --ranks {plans[0].plan.num_ranks} -o hardware.json` measures larger ones for --hardware."
        )
