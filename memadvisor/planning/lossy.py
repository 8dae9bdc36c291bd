"""What a plan would give with optimizer state, or activations, in few bits: lossy, so it is shown beside the plans, and
never one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memadvisor.activation_bits import BITS
from memadvisor.coded_states import check_optimizer_bits
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.simulate import simulate
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import Plan, Prediction
from memadvisor.planning.several_models import updates_apart
from memadvisor.policies import blocks_of
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyAlternative:
    """The first plan with what `option` of `run` asks for, as predicted.

    `step_time_s`: None where the machine's part in it is not measured. `peak_bytes`: allocated.
    """

    option: str
    peak_bytes: int
    step_time_s: float | None


def check_asked_bits(bits: int | None, transfers: TransferTimes | None) -> None:
    """Raise UsageError where all plans are to have optimizer state in so many bits, and cannot, or nobody knows how fast."""
    if bits is None:
        return
    check_optimizer_bits({bits}, {}, "This advice")
    if transfers is None or Lane.COMPUTE not in transfers.bandwidths:
        raise UsageError(
            "Nothing is known of how long coding optimizer state takes, so no step time can be predicted.",
            hint="measure it with `memadvisor calibrate -o hardware.json`, and pass --hardware hardware.json.",
        )


def lossy_alternatives(
    step: CapturedStep, plan: Plan, times: CollectiveTimes | None, transfers: TransferTimes | None
) -> tuple[LossyAlternative, ...]:
    """What `plan` could be, where that has a lower peak than `plan`, or a shorter step."""
    coded = with_coded_states(step, plan, times, transfers)
    rounded = with_rounded_activations(step, plan, times, transfers)
    found = (*((coded,) if coded is not None else ()), *rounded)
    return tuple(each for each in found if _gains(each, plan.prediction))


def _gains(found: LossyAlternative, exact: Prediction | None) -> bool:
    if exact is None or found.peak_bytes < exact.peak_bytes:
        return True
    return found.step_time_s is not None and found.step_time_s < exact.step_time_s


def with_coded_states(
    step: CapturedStep, plan: Plan, times: CollectiveTimes | None, transfers: TransferTimes | None
) -> LossyAlternative | None:
    """`plan`, of the step as it is, with all optimizer state in 8 bits; None where none of it may be, or it is already."""
    if plan.optimizer_codes or plan.parameter_tiers != {"device"}:
        return None
    if not _may_be_coded(step) or updates_apart(step):
        return None
    units = tuple(replace(unit, optimizer_bits=8, optimizer_tier="device") for unit in plan.units)
    coded = replace(plan, units=units, optimizer_tier="device", update_in_backward=False)
    bandwidths = dict(transfers.bandwidths) if transfers is not None else {}
    is_known = Lane.COMPUTE in bandwidths
    bandwidths.setdefault(Lane.COMPUTE, TierBandwidth(read_bytes_per_s=1.0, write_bytes_per_s=1.0))
    played = simulate(
        step, write_schedule(coded, step.units), times, transfers=TransferTimes(bandwidths, "for the peak")
    )
    return LossyAlternative(
        option="--optimizer-bits 8",
        peak_bytes=played.peak_bytes,
        step_time_s=played.step_time_s if is_known else None,
    )


def with_rounded_activations(
    step: CapturedStep, plan: Plan, times: CollectiveTimes | None, transfers: TransferTimes | None
) -> Iterator[LossyAlternative]:
    """`plan`, of the step as it is, with the activations of all blocks in few bits, and none of them recomputed or moved."""
    blocks = set(blocks_of(step.units))
    rounds = {save.unit for one in step.roundable for save in one.saves if save.rounds}
    if not blocks & rounds:
        return
    kept = [
        replace(unit, recompute=False, kept=(), activation_tier="device") if unit.name in blocks else unit
        for unit in plan.units
    ]
    for bits in BITS:
        units = tuple(replace(unit, activation_bits=bits) if unit.name in blocks else unit for unit in kept)
        rounded = replace(plan, units=units, stretches=())
        played = simulate(step, write_schedule(rounded, step.units), times, transfers=transfers)
        yield LossyAlternative(
            option=f"--compress-activations {bits}",
            peak_bytes=played.peak_bytes,
            step_time_s=None if step.rounding_cost is None else played.step_time_s,
        )


def _may_be_coded(step: CapturedStep) -> bool:
    states = step.states.values()
    whole = any(is_coded for own in states for items in own.state_items.values() for _, is_coded in items)
    return whole or any(
        item.is_coded for own in states for items in own.shard_items.values() for item in items
    )
