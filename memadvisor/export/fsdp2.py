"""A plan as a Python module with `apply(model, mesh)`: fully_shard on exactly its units, torch.utils.checkpoint on those
that run again. The code is fsdp2_code.py's; here are the settings that it reads, as Python literals.

FSDP2 shards what it has, units of stages 0 to 2 among them. Where no unit is
sharded at all, the mesh has shards of one rank, so that parameters stay whole and gradients are summed as in DDP.
"""

from __future__ import annotations

from memadvisor.autocast import AUTOCAST_DTYPES
from memadvisor.errors import PlanError
from memadvisor.export.exported import (
    MORE_HOST_MEMORY,
    OTHER_TIME,
    Difference,
    Exported,
    remarks,
)
from memadvisor.export.features import undone
from memadvisor.export.fsdp2_code import CODE
from memadvisor.export.quoting import comments
from memadvisor.export.reading import gathered_by_fsdp, instead_of_autocast, stages
from memadvisor.plan import Plan, UnitPlan
from memadvisor.unit_ranges import unit_ranges

_SAID = frozenset(
    ("kept", "shard_ranks", "secondary_ranks", "reduce_dtype", "narrow_sums", "masters", "models", "autocast")
)


def to_fsdp2(plan: Plan) -> Exported:
    """Raises PlanError for a plan made by hand, which names no units."""
    if not plan.units:
        raise PlanError(
            "The plan names no units: it was made by hand, and is worked out on the live model.",
            hint="make one of a recorded run with `memadvisor advise RUN -o plan.json`.",
        )
    frees_whole, differences = _whole_units(plan)
    differences += _tiers(plan)
    differences += instead_of_autocast(
        plan, "MixedPrecisionPolicy: weights are gathered in bfloat16, and all operators compute in it"
    )
    said = set(_SAID) | {"optimizer_tier", "parameter_tier", "gather_depth"}
    differences += undone(plan, said)
    batch = [
        f"{what}: {'the script keeps its own, as the plan does' if value is None else value}"
        for what, value in (
            ("micro-batch", plan.micro_batch_size),
            ("gradient accumulation", plan.grad_accum),
        )
    ]
    lines = remarks(plan, differences, batch)
    return Exported(
        text=comments(lines) + _settings(plan, frees_whole) + CODE,
        has_comments=True,
        remarks=lines,
        differences=tuple(differences),
    )


def _whole_units(plan: Plan) -> tuple[bool, list[Difference]]:
    """Whether units of stages 0 to 2 are freed after the forward, and how that differs; nothing where none is sharded."""
    by_unit = stages(plan)
    whole = sorted({stage for stage in by_unit.values() if stage < 3})
    if max(by_unit.values()) == 0 or not whole:
        return False, []
    words = "; ".join(
        f"stage {stage} for {unit_ranges(name or '(model)' for name, its in by_unit.items() if its == stage)}"
        for stage in whole
    )
    reshards, difference = gathered_by_fsdp(plan, f"whole parameters (ZeRO {words})")
    return reshards, [difference]


def _tiers(plan: Plan) -> list[Difference]:
    away = {tier for unit in plan.units for tier in (unit.optimizer_tier, unit.parameter_tier)} - {"device"}
    if not away:
        return []
    names = unit_ranges(unit.name or "(model)" for unit in plan.units if _is_away(unit))
    return [
        Difference(
            wanted=f"states on the {' and the '.join(sorted(away))} ({names})",
            instead="parameters, gradients and optimizer state of these on the host, where the CPU updates them",
            errs=MORE_HOST_MEMORY if "disk" in away else OTHER_TIME,
        )
    ]


def _is_away(unit: UnitPlan) -> bool:
    return unit.optimizer_tier != "device" or unit.parameter_tier != "device"


def _settings(plan: Plan, frees_whole: bool) -> str:
    """Module constants; `ascii` of plain values, so that a name can hold anything and end nothing."""
    names = [model.name for model in plan.models] or [""]
    is_replicated = max(stages(plan).values()) == 0
    shard_ranks = 1 if is_replicated else plan.group_ranks
    again = set(plan.recomputed_units)
    models = "".join(
        f"    {name!a}: (\n"
        + "".join(
            f"        {_unit(plan, unit, name, frees_whole, is_again=unit.name in again)},\n"
            for unit in plan.units
            if not plan.models or plan.model_of(unit.name) == name
        )
        + "    ),\n"
        for name in names
    )
    param_dtype = _param_dtype(plan)
    return (
        "\n"
        f"NUM_RANKS = {plan.num_ranks}\n"
        f"SHARD_RANKS = {shard_ranks}  # that share what is sharded\n"
        f"GATHER_DEPTH = {plan.gather_depth}  # units gathered ahead\n"
        f"PARAM_DTYPE = {param_dtype!a}\n"
        f"REDUCE_DTYPE = {_reduce_dtype(plan)!a}\n"
        f"HAS_MASTERS = {plan.precision.has_masters!a}  # a model of 16 bits is updated in float32\n"
        f"FINGERPRINTS = {_fingerprints(plan)!a}\n"
        "# Of each model, by name: its units in order of execution. A unit: name, reshard_after_forward (a number: to so many\n"
        "# ranks), whether it runs again, operators whose outputs it keeps nevertheless, whether its states are on the host.\n"
        f"MODELS = {{\n{models}}}\n"
    )


def _reduce_dtype(plan: Plan) -> str | None:
    """FSDP2 sums in what it computes with, unless it is told otherwise; a plan sums in float32."""
    return plan.precision.reduce_dtype or ("float32" if _param_dtype(plan) not in (None, "float32") else None)


def _param_dtype(plan: Plan) -> str | None:
    return plan.precision.param_dtype if plan.autocast is None else AUTOCAST_DTYPES[plan.autocast]


def _fingerprints(plan: Plan) -> dict[str, str]:
    if plan.models:
        return {model.name: model.fingerprint for model in plan.models}
    return {} if plan.fingerprint is None else {"": plan.fingerprint}


def _unit(plan: Plan, unit: UnitPlan, model: str, frees_whole: bool, *, is_again: bool) -> str:
    name = unit.name.removeprefix(model).removeprefix(".") if model else unit.name
    is_sharded = unit.stage_on(plan.num_ranks) == 3
    reshards: bool | int = unit.reshard if is_sharded else frees_whole
    if is_sharded and reshards and plan.secondary_ranks is not None:
        reshards = plan.secondary_ranks
    return ascii((name, reshards, is_again, unit.kept if is_again else (), _is_away(unit)))
