"""All that a plan may ask for beside stages, recomputation, micro-batch and accumulation: so that no export drops it.

Each target names what it has said in its own settings; whatever else a plan asks for becomes a difference here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from memadvisor.export.exported import (
    COARSER,
    FINER,
    LESS_MEMORY_MORE_TIME,
    MORE_MEMORY,
    MORE_MEMORY_LESS_TIME,
    MORE_TIME,
    OTHER_TIME,
    Difference,
)
from memadvisor.export.reading import autocast_wanted, stages
from memadvisor.plan import Plan
from memadvisor.stretches import stretches_text
from memadvisor.unit_ranges import unit_ranges


@dataclass(frozen=True, slots=True)
class Feature:
    """`wanted`: in words, what a plan asks for; nothing where it does not."""

    wanted: Callable[[Plan], str]
    instead: str
    errs: str


def undone(plan: Plan, said: Collection[str]) -> list[Difference]:
    """What the plan asks for of FEATURES, but for those that are `said` otherwise."""
    unknown = set(said) - set(FEATURES)
    if unknown:
        raise AssertionError(f"no features: {sorted(unknown)}")
    return [
        Difference(wanted=words, instead=feature.instead, errs=feature.errs)
        for name, feature in FEATURES.items()
        if name not in said and (words := feature.wanted(plan))
    ]


def _tiers(what: str, of_unit: str, of_plan: str) -> Callable[[Plan], str]:
    """Where something of units lies, by tier; a plan made by hand says it of all."""

    def words(plan: Plan) -> str:
        tiers = (
            [getattr(plan, of_plan)] if not plan.units else sorted({getattr(u, of_unit) for u in plan.units})
        )
        parts = []
        for tier in tiers:
            names = unit_ranges(u.name or "(model)" for u in plan.units if getattr(u, of_unit) == tier)
            if tier != "device":
                parts.append(f"{what} on the {tier}{f' ({names})' if names else ''}")
        return ", ".join(parts)

    return words


def _bits(what: str, of_unit: str, of_plan: str) -> Callable[[Plan], str]:
    def words(plan: Plan) -> str:
        if not plan.units:
            bits = getattr(plan, of_plan)
            return f"{what} in {bits} bits" if bits is not None else ""
        names = [u.name or "(model)" for u in plan.units if getattr(u, of_unit) is not None]
        bits = sorted({getattr(u, of_unit) for u in plan.units} - {None})
        return f"{what} in {' and '.join(map(str, bits))} bits ({unit_ranges(names)})" if names else ""

    return words


def _kept(plan: Plan) -> str:
    names = unit_ranges(unit.name or "(model)" for unit in plan.units if unit.kept)
    if names:
        return f"outputs of operators kept in recomputed units ({names})"
    by_hand = not plan.units and plan.policy in ("selective", "kwai")
    return f"outputs of operators kept by the policy {plan.policy}" if by_hand else ""


def _all_reduces(plan: Plan) -> str:
    c = plan.compression
    parts = (
        f"gradients all-reduced in {c.all_reduce_bits} bits" if c.all_reduce_bits is not None else "",
        f"{c.all_reduce_top} of 256 elements all-reduced" if c.all_reduce_top is not None else "",
        f"gradients all-reduced with rank {c.all_reduce_rank}" if c.all_reduce_rank is not None else "",
    )
    return "".join(parts)


def _ahead(plan: Plan) -> str:
    if max(stages(plan).values()) < 3:
        return ""
    return f"{plan.gather_depth or 'no'} unit{'s' * (plan.gather_depth != 1)} gathered ahead"


def _if(is_so: Callable[[Plan], object], words: Callable[[Plan], str]) -> Callable[[Plan], str]:
    return lambda plan: words(plan) if is_so(plan) else ""


def _half(dtype: str | None) -> str | None:
    return None if dtype == "float32" else dtype


_WHOLE = "messages are as large as the numbers themselves"

FEATURES: dict[str, Feature] = {
    "optimizer_tier": Feature(
        _tiers("optimizer state", "optimizer_tier", "optimizer_tier"), "it stays on the device", MORE_MEMORY
    ),
    "parameter_tier": Feature(
        _tiers("parameters and gradients", "parameter_tier", "parameter_tier"),
        "they stay on the device",
        MORE_MEMORY,
    ),
    "activation_tier": Feature(
        _tiers("activations", "activation_tier", "activation_tier"),
        "they stay on the device",
        MORE_MEMORY_LESS_TIME,
    ),
    "optimizer_bits": Feature(
        _bits("optimizer state", "optimizer_bits", "optimizer_bits"), "it is kept as it is", MORE_MEMORY
    ),
    "activation_bits": Feature(
        _bits("activations", "activation_bits", "activation_bits"),
        "they are kept as they are",
        MORE_MEMORY_LESS_TIME,
    ),
    "kept": Feature(
        _kept, "such units run again as a whole, and keep their inputs alone", LESS_MEMORY_MORE_TIME
    ),
    "kept_calls": Feature(
        _if(
            lambda plan: any(unit.kept_calls for unit in plan.units),
            lambda plan: (
                "some calls of units that a step calls several times keep what they do "
                f"({unit_ranges(unit.name or '(model)' for unit in plan.units if unit.kept_calls)})"
            ),
        ),
        "all of their calls run again",
        LESS_MEMORY_MORE_TIME,
    ),
    "parts": Feature(
        _if(
            lambda plan: any(unit.parts for unit in plan.units),
            lambda plan: (
                "parts of units run again by themselves "
                f"({unit_ranges(unit.name or '(model)' for unit in plan.units if unit.parts)})"
            ),
        ),
        "they are kept with their unit, or run again with it",
        MORE_MEMORY_LESS_TIME,
    ),
    "stretches": Feature(
        _if(lambda plan: plan.stretches, lambda plan: stretches_text(plan.unit_stretches)),
        "each unit runs again by itself, and keeps its own input",
        MORE_MEMORY_LESS_TIME,
    ),
    "shard_ranks": Feature(
        _if(
            lambda plan: plan.group_ranks < plan.num_ranks,
            lambda plan: f"shards shared among {plan.group_ranks} ranks",
        ),
        "they are shared among all ranks",
        LESS_MEMORY_MORE_TIME,
    ),
    "secondary_ranks": Feature(
        _if(
            lambda plan: plan.secondary_ranks is not None,
            lambda plan: f"second copies for the backward among {plan.secondary_ranks} ranks (hpZ)",
        ),
        "the backward's gathers go among all ranks",
        LESS_MEMORY_MORE_TIME,
    ),
    "gather_depth": Feature(_ahead, "the engine looks ahead in its own way", OTHER_TIME),
    "reduce_depth": Feature(
        _if(
            lambda plan: plan.reduce_depth > 1,
            lambda plan: f"reductions of {plan.reduce_depth} units under way at once",
        ),
        "the engine reduces beside the backward in its own way",
        OTHER_TIME,
    ),
    "overlap": Feature(
        _if(
            lambda plan: not plan.overlap and max(stages(plan).values()) > 0 and plan.num_ranks > 1,
            lambda plan: "no reduction beside the backward",
        ),
        "the engine reduces beside the backward in its own way",
        OTHER_TIME,
    ),
    "update_in_backward": Feature(
        _if(lambda plan: plan.update_in_backward, lambda plan: "updates inside the backward"),
        "gradients wait for the optimizer step",
        MORE_MEMORY,
    ),
    "update_by_unit": Feature(
        _if(lambda plan: plan.update_by_unit, lambda plan: "updates of units one after another"),
        "the optimizer updates all parameters together",
        MORE_MEMORY,
    ),
    "fused_updates": Feature(
        _if(lambda plan: plan.fused_updates, lambda plan: "fused updates"),
        "the optimizer updates as the script made it, fused or not",
        MORE_MEMORY,
    ),
    "chunked_loss": Feature(
        _if(lambda plan: plan.chunked_loss is not None, lambda plan: "the loss in chunks"),
        "the loss takes all of the last layer's output at once",
        MORE_MEMORY,
    ),
    "autocast": Feature(
        _if(lambda plan: plan.autocast is not None, autocast_wanted),
        "all operators compute in float32",
        MORE_MEMORY,
    ),
    "delayed_update": Feature(
        _if(lambda plan: plan.delayed_update, lambda plan: "updates one step late, under the next step"),
        "updates are done in their own step, with nothing beside them",
        MORE_TIME,
    ),
    "local_sgd": Feature(
        _if(
            lambda plan: plan.local_sgd is not None,
            lambda plan: (
                f"parameters averaged every {plan.local_sgd and plan.local_sgd.period} steps (local SGD)"
            ),
        ),
        "gradients are reduced in every step",
        MORE_TIME,
    ),
    "gather_bits": Feature(
        _if(
            lambda plan: plan.compression.gather_bits is not None,
            lambda plan: f"parameters gathered in {plan.compression.gather_bits} bits",
        ),
        _WHOLE,
        FINER,
    ),
    "reduce_bits": Feature(
        _if(
            lambda plan: plan.compression.reduce_bits is not None,
            lambda plan: f"gradients reduced in {plan.compression.reduce_bits} bits",
        ),
        _WHOLE,
        FINER,
    ),
    "all_reduces": Feature(_all_reduces, _WHOLE, FINER),
    "reduce_dtype": Feature(
        _if(
            lambda plan: (
                _half(plan.precision.param_dtype)
                and _half(plan.precision.param_dtype) != plan.precision.reduce_dtype
            ),
            lambda plan: f"gradients summed over the ranks in {plan.precision.reduce_dtype or 'float32'}",
        ),
        "they are summed in what parameters are computed with",
        COARSER,
    ),
    "narrow_sums": Feature(
        _if(
            lambda plan: _half(plan.precision.reduce_dtype) and not _half(plan.precision.param_dtype),
            lambda plan: f"gradients summed over the ranks in {plan.precision.reduce_dtype}",
        ),
        "they are summed as they are",
        FINER,
    ),
    "masters": Feature(
        _if(lambda plan: plan.precision.has_masters, lambda plan: "float32 masters of a model of 16 bits"),
        "parameters are updated as they are",
        COARSER,
    ),
    "models": Feature(
        _if(lambda plan: len(plan.models) > 1, lambda plan: f"units of {len(plan.models)} models"),
        "one setting for each of them",
        OTHER_TIME,
    ),
    "algorithms": Feature(
        _if(lambda plan: plan.algorithms, lambda plan: "collectives by algorithms that were measured"),
        "the backend's own",
        OTHER_TIME,
    ),
}
