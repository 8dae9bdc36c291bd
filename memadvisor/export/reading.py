"""What exports read from a plan: one stage for a whole model, its layers, and what is recomputed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from memadvisor.autocast import AUTOCAST_DTYPES
from memadvisor.export.exported import COARSER, LESS_MEMORY_MORE_TIME, MORE_MEMORY, WITHIN_BUDGET, Difference
from memadvisor.plan import Plan
from memadvisor.unit_ranges import unit_ranges

_LAYER = re.compile(r"(.*\.)?[0-9]+", re.ASCII | re.DOTALL)


def stages(plan: Plan) -> dict[str, int]:
    """The ZeRO stage in effect of each unit; of a plan made by hand that of "" stands for all."""
    if not plan.units:
        stage = plan.zero_stage if plan.num_ranks > 1 or plan.parameter_tier != "device" else 0
        return {"": stage}
    return {unit.name: unit.stage_on(plan.num_ranks) for unit in plan.units}


def one_stage(plan: Plan) -> tuple[int, list[Difference]]:
    """For engines that have one stage for all units: the highest, which needs no more memory than the plan."""
    by_unit = stages(plan)
    highest = max(by_unit.values())
    if len(set(by_unit.values())) == 1:
        return highest, []
    words = "; ".join(
        f"stage {stage} for {unit_ranges(name or '(model)' for name, its in by_unit.items() if its == stage)}"
        for stage in sorted(set(by_unit.values()), reverse=True)
    )
    difference = Difference(
        wanted=f"ZeRO stages by unit ({words})",
        instead=f"stage {highest} for all units",
        errs=LESS_MEMORY_MORE_TIME,
    )
    return highest, [difference]


def resharding(plan: Plan) -> tuple[bool, list[Difference]]:
    """For engines with one setting: whether units of stage 3 free their parameters after the forward: if any does."""
    kept = [unit.name for unit in plan.units if unit.stage_on(plan.num_ranks) == 3 and unit.is_kept]
    num_sharded = sum(stage == 3 for stage in stages(plan).values())
    if not kept or len(kept) == num_sharded:
        return not kept, []
    difference = Difference(
        wanted=f"parameters kept from the forward to the backward in {unit_ranges(kept)} alone",
        instead="all units free them after the forward",
        errs=LESS_MEMORY_MORE_TIME,
    )
    return True, [difference]


def gathered_by_fsdp(plan: Plan, wanted: str) -> tuple[bool, Difference]:
    """What FSDP2 does with units whose parameters are whole in the plan (stages 0 to 2): whether it frees them after the
    forward, and how that differs.

    Kept to the backward they are gathered as often as under stage 2, and lie beside their shards. Where these do not fit
    between the predicted need and the budget (by the parameters at the peak), they are freed, and gathered twice.
    """
    held = "sharded, gathered for each forward and kept to the backward, beside their shards"
    prediction, budget_bytes = plan.prediction, plan.budget_bytes
    if prediction is None or budget_bytes is None:
        return False, Difference(wanted=wanted, instead=held, errs=MORE_MEMORY)
    more_bytes = prediction.by_category_bytes.get("parameter", 0) / plan.group_ranks
    if prediction.needed_bytes + more_bytes <= budget_bytes:
        return False, Difference(wanted=wanted, instead=held, errs=WITHIN_BUDGET)
    freed = "sharded, freed after the forward and gathered again for the backward"
    return True, Difference(wanted=wanted, instead=freed, errs=LESS_MEMORY_MORE_TIME)


def autocast_note(plan: Plan) -> list[str]:
    """A plan without a precision leaves that of the script alone, and does not know it; engines start from float32."""
    if plan.precision.is_lossy or plan.precision.has_masters or plan.autocast is not None:
        return []
    return [
        "mixed precision, where the script computes under autocast: the plan leaves that alone, and here is float32"
    ]


def autocast_wanted(plan: Plan) -> str:
    """Of a plan that has it."""
    assert plan.autocast is not None
    return f"forwards under autocast to {AUTOCAST_DTYPES[plan.autocast]}"


def instead_of_autocast(plan: Plan, instead: str) -> list[Difference]:
    """Where an engine computes in the dtype in another way."""
    if plan.autocast is None:
        return []
    return [Difference(wanted=autocast_wanted(plan), instead=instead, errs=COARSER)]


def layers(plan: Plan) -> tuple[str, ...]:
    """Units that end in a number, of the parent that has most of those: what engines for transformers call layers.

    A plan does not say which units are blocks of one class; their names do as a rule (`blocks.3`, `model.layers.3`).
    """
    parents = Counter(unit.name.rpartition(".")[0] for unit in plan.units if _LAYER.fullmatch(unit.name))
    if not parents:
        return ()
    parent, _ = parents.most_common(1)[0]
    return tuple(
        unit.name
        for unit in plan.units
        if _LAYER.fullmatch(unit.name) and unit.name.rpartition(".")[0] == parent
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Which units run again. `is_every_layer`: all layers and nothing else do. `keeps`: some keep outputs of operators.

    `units` is empty for a plan made by hand, whose `policy` is worked out on the live model.
    """

    units: tuple[str, ...]
    policy: str
    num_layers: int
    is_every_layer: bool
    keeps: bool

    @property
    def is_any(self) -> bool:
        return bool(self.units) or self.policy not in ("none", "chosen")

    @property
    def words(self) -> str:
        if self.units:
            return f"{unit_ranges(name or '(model)' for name in self.units)} recomputed"
        return f"blocks recomputed by the policy {self.policy}"


def recomputation(plan: Plan) -> Recomputation:
    units, own = plan.recomputed_units, layers(plan)
    policy = "chosen" if plan.units else plan.policy
    return Recomputation(
        units=units,
        policy=policy,
        num_layers=len(own),
        is_every_layer=(bool(own) and set(units) == set(own)) or policy == "every-layer",
        keeps=any(unit.kept for unit in plan.units) or policy in ("selective", "kwai"),
    )
