"""What a plan says of each unit of a model: by name, or by a policy that is worked out on the model's blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from memadvisor.errors import PlanError
from memadvisor.plan import Plan, UnitPlan
from memadvisor.run.records import Unit

# What `selective` and `kwai` keep: the operators below torch's products, convolutions and attention, on every device.
SELECTIVE = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)


KEEPING = ("selective", "kwai")
RECOMPUTING = ("every-layer", "sqrt", *KEEPING)  # policies of plans made by hand, beside none


def resolve_units(plan: Plan, units: Sequence[Unit]) -> tuple[UnitPlan, ...]:
    """The plan's word on each of `units`: its own entry, else its `zero_stage` and `policy`.

    `every-layer` recomputes every block; `sqrt` leaves every round(sqrt(n))-th of n blocks as it is, so that
    about sqrt(n) stretches are recomputed (arXiv:1604.06174). A block is one of several units of one class
    that stand side by side in the model. `selective` recomputes every block, and keeps what its matrix products,
    convolutions and attention give: what is left is large and cheap (arXiv:2205.05198, section 5). `kwai` recomputes and
    keeps the same, and what it keeps is not in the device's memory (Megatron-Kwai, Yuan et al., ATC 2024).
    `activation_units` are taken out of the device's memory, activations of `compressed_units` are rounded, or those of
    all blocks where none is named; what is recomputed keeps no more than its input, exactly. Raises PlanError where a
    name, or a pattern, is no unit's.
    """
    given = {unit.name: unit for unit in plan.units}
    offloaded = (
        _named(plan.activation_units, units, "offload") if plan.activation_tier != "device" else frozenset()
    )
    rounded = (
        _named(plan.compressed_units, units, "compress") if plan.activation_bits is not None else frozenset()
    )
    if all(unit.name in given for unit in units):  # as in each plan that a search asks about
        return tuple(given[unit.name] for unit in units)
    recomputed = recomputed_by_policy(plan.policy, blocks_of(units))
    return tuple(
        given.get(unit.name) or _by_policy(plan, unit.name, recomputed, offloaded, rounded) for unit in units
    )


def _by_policy(
    plan: Plan,
    name: str,
    recomputed: frozenset[str],
    offloaded: frozenset[str],
    rounded: frozenset[str],
) -> UnitPlan:
    """What the plan's own fields say of a unit."""
    return UnitPlan(
        name=name,
        zero_stage=plan.zero_stage,
        recompute=name in recomputed,
        optimizer_tier=plan.optimizer_tier,
        parameter_tier=plan.parameter_tier,
        optimizer_bits=plan.optimizer_bits,
        kept=SELECTIVE if plan.policy in KEEPING and name in recomputed else (),
        activation_tier=plan.activation_tier if name in offloaded else "device",
        activation_bits=plan.activation_bits if name in rounded - recomputed else None,
    )


def blocks_of(units: Sequence[Unit]) -> tuple[str, ...]:
    """Names of the units that are blocks: two or more of one class under one parent, holding modules."""
    kinds = [(unit.name.rpartition(".")[0], unit.type_name) for unit in units]
    return tuple(
        unit.name for unit, kind in zip(units, kinds, strict=True) if unit.is_block and kinds.count(kind) > 1
    )


def _named(patterns: Sequence[str], units: Sequence[Unit], verb: str) -> frozenset[str]:
    if not patterns:
        return frozenset(blocks_of(units))
    found: set[str] = set()
    for pattern in patterns:
        matching = {unit.name for unit in units if fnmatchcase(unit.name, pattern)}
        if not matching:
            # The unit of a model's own parameters has no name to give.
            named = [repr(unit.name) for unit in units if unit.name]
            raise PlanError(
                f"The model has no unit {pattern!r} to {verb}.",
                hint=f"name one of {', '.join(named[:8])}{', ...' * (len(named) > 8)}.",
            )
        found |= matching
    return frozenset(found)


def recomputed_by_policy(policy: str, blocks: Sequence[str]) -> frozenset[str]:
    """Which blocks a policy recomputes: `every-layer`, `selective` and `kwai` all; nothing by any other name."""
    if policy == "every-layer" or policy in KEEPING:
        return frozenset(blocks)
    if policy == "sqrt" and blocks:
        stride = max(2, round(math.sqrt(len(blocks))))
        return frozenset(name for position, name in enumerate(blocks, start=1) if position % stride)
    return frozenset()
