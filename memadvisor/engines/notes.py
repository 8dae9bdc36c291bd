"""What a plan turns out to mean for one live model, in words."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memadvisor.activation_bits import rounding_text
from memadvisor.autocast import autocast_loss_text
from memadvisor.chunked_loss import chunked_loss_text
from memadvisor.coded_states import optimizer_bits_text
from memadvisor.compression import compression_loss_text
from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.owners import Owners
from memadvisor.engines.updates.delayed_updates import DELAY_LOSS_TEXT
from memadvisor.fused_updates import fused_updates_text
from memadvisor.local_sgd import local_sgd_loss_text
from memadvisor.plan import Plan
from memadvisor.policies import RECOMPUTING
from memadvisor.precision import loss_text, masters_text
from memadvisor.schedule import Schedule
from memadvisor.units import counted, format_bytes


def warnings_of(plan: Plan) -> Iterator[str]:
    """How a training will differ from what it is without the plan."""
    if plan.precision.has_masters:
        yield f"This plan changes the updates: {masters_text(plan.precision)}"
    if plan.precision.is_lossy:
        yield f"This plan is lossy: {loss_text(plan.precision)}"
    if plan.autocast is not None:
        yield f"This plan is lossy: {autocast_loss_text(plan.autocast)}"
    if plan.compression.is_lossy:
        yield f"This plan is lossy: {compression_loss_text(plan.compression)}"
    if plan.local_sgd is not None:
        yield f"This plan is lossy: {local_sgd_loss_text(plan.local_sgd)}"
    for bits in plan.optimizer_codes:
        yield f"This plan is lossy: {optimizer_bits_text(bits)}"
    if plan.delayed_update:
        yield f"This plan is lossy: {DELAY_LOSS_TEXT}"
    if plan.fused_updates:
        yield f"Results of this plan are not bit for bit the same: {fused_updates_text()}"
    if plan.chunked_loss is not None:
        yield f"Results of this plan are not bit for bit the same: {chunked_loss_text()}"
    if plan.rounded_to:
        yield f"This plan is lossy: {rounding_text(plan.rounded_to)}"


def touched_activations(schedule: Schedule) -> str:
    """What is done to activations of some unit, for which a model must not be compiled; nothing where nothing is."""
    if schedule.stretches:
        return "Recomputation"
    if any(unit.activation_tier != "device" for unit in schedule.units):
        return "Offloading of activations"
    return "Rounding of activations" * any(unit.activation_bits is not None for unit in schedule.units)


def notes_on(executor: Executor) -> Iterator[tuple[str, str]]:
    """What is worth saying of a model that a plan was applied to: level and text."""
    sharded = [flat for flat in executor.flats if flat.stage >= 1]
    padding_bytes = sum(flat.padding_bytes for flat in sharded)
    padding = f" and {format_bytes(padding_bytes)} of padding" if padding_bytes else ""
    yield (
        "info",
        f"{type(executor.sharded.live.root).__name__} follows the plan: {counted(len(executor.units), 'unit')}, with "
        f"{counted(len(sharded), 'sharded buffer')} of parameters{padding}",
    )
    if executor.sharded.schedule.precision.has_masters and not any(flat.has_masters for flat in sharded):
        yield (
            "warning",
            "the plan's optimizer_dtype has no effect: no trainable parameter is bfloat16 or float16",
        )
    of_float32 = any(flat.script_dtype == torch.float32 for flat in sharded)
    if executor.sharded.schedule.precision.is_lossy and not of_float32:
        yield ("warning", "the plan's precision has no effect: no sharded parameter of the model is float32")
    if executor.sharded.schedule.compression.is_lossy and not of_float32:
        yield (
            "warning",
            "the plan's compression has no effect: no sharded parameter of the model is float32",
        )
    can_send = executor.service.can_send(executor.flats[0].device) if executor.flats else True
    if executor.sharded.any_order and executor.num_shared_stages == 3 and not can_send:
        exactly = ", in float32," if executor.sharded.schedule.compression.gather_bits else ""
        yield (
            "warning",
            "DDP allows unused parameters (find_unused_parameters or static_graph): ZeRO stage 3 fetches "
            f"parameters{exactly} rank by rank, which is slow",
        )


def without_effect(plan: Plan, schedule: Schedule, model: str) -> Iterator[str]:
    """What a plan made by hand asks of a model's blocks, where it has none: nothing is done, which nobody would see."""
    asked = {
        f"the policy {plan.policy} recomputes": plan.policy in RECOMPUTING and not schedule.stretches,
        "the plan's activation_tier moves": plan.activation_tier != "device"
        and all(unit.activation_tier == "device" for unit in schedule.units),
        "the plan's activation_bits round": plan.activation_bits is not None
        and all(unit.activation_bits is None for unit in schedule.units),
    }
    blocks_recompute = plan.activation_bits is not None and bool(schedule.stretches)
    why = (
        f"the policy {plan.policy} recomputes what they would"
        if blocks_recompute
        else "no two modules of one class stand side by side in it"
    )
    for what, is_in_vain in asked.items():
        if is_in_vain and not plan.units:
            yield f"{what} nothing of {model}: {why}"


def note_on_owners(optimizer: torch.optim.Optimizer, owners: Owners, num_ranks: int) -> str:
    """What it means that an optimizer needs whole parameters, of which `num_ranks` ranks own some each."""
    return (
        f"{type(optimizer).__name__} needs whole parameters: each is updated by one rank, and the rank with "
        f"most has {100 * owners.largest_fraction:.1f} % of their bytes ({100 / num_ranks:.1f} % if even)"
    )
