"""What a plan changes, in a few words."""

from __future__ import annotations

from collections.abc import Sequence

from memadvisor.autocast import autocast_text
from memadvisor.compression import compression_text
from memadvisor.errors import PlanError
from memadvisor.local_sgd import local_sgd_text
from memadvisor.plan import Plan, UnitPlan
from memadvisor.policies import resolve_units
from memadvisor.precision import precision_text
from memadvisor.run.records import Unit
from memadvisor.stretches import stretches_text
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import counted


def behind_text(plan: Plan) -> str:
    """`one unit behind`: by how much reductions to shards may be later than backwards."""
    return "one unit behind" if plan.reduce_depth == 1 else f"up to {plan.reduce_depth} units behind"


def options_text(plan: Plan) -> str:
    """What it asks for beside the words on its units, to follow others after a comma; nothing where that is nothing."""
    return (
        (f", shards in groups of {plan.group_ranks}" if plan.group_ranks < plan.num_ranks else "")
        + precision_text(plan.precision)
        + autocast_text(plan.autocast)
        + compression_text(plan.compression)
        + local_sgd_text(plan.local_sgd)
        + (f", {plan.elsewhere}" if plan.elsewhere else "")
        + (f", {stretches_text(plan.unit_stretches)}" if plan.stretches else "")
        + (f", gathers {plan.gather_depth} ahead" if plan.gather_depth else "")
        + (f", reductions {behind_text(plan)}" if plan.overlap else "")
        + (", units updated in the backward" if plan.update_in_backward else "")
        + (", units updated one after another" if plan.update_by_unit else "")
        + (", fused updates" if plan.fused_updates else "")
        + (", the loss in chunks" if plan.chunked_loss is not None else "")
    )


def plan_text(plan: Plan, units: Sequence[Unit]) -> str:
    """`for 2 ranks, policy chosen, ZeRO stage 2, 6 of 8 units recomputed, reductions one unit behind`."""
    parts = [f"for {plan.num_ranks} rank{'s' * (plan.num_ranks > 1)}", f"policy {plan.policy}"]
    if plan.ranks:
        return ", ".join([*parts, ranks_text(plan)])
    chosen = _resolved(plan, units)
    if plan.num_ranks > 1:
        stages = sorted({unit.zero_stage for unit in chosen} or {plan.zero_stage})
        parts.append(f"ZeRO stage {'/'.join(map(str, stages))}")
    again = sum(unit.recompute or unit.name in plan.recomputed_units for unit in chosen)
    away = [unit.elsewhere for unit in plan.units if unit.elsewhere]
    inside = len(plan.parted_units)
    for number, what in (
        (again, "recomputed"),
        (inside, "recomputed in parts"),
        (len(away), f"with {'; '.join(dict.fromkeys(away))}"),
    ):
        if number:
            parts.append(f"{number} of {counted(len(chosen), 'unit')} {what}")
    return ", ".join(parts) + options_text(plan)


def results_text(plan: Plan) -> str:
    """What results of the training are by design, beside those without the plan."""
    is_lossy = (
        plan.precision.is_lossy
        or plan.compression.is_lossy
        or plan.autocast is not None
        or plan.local_sgd is not None
        or bool(plan.optimizer_codes)
        or plan.delayed_update
        or bool(plan.rounded_to)
    )
    if is_lossy:
        return "other than without the plan, which is lossy"
    if plan.fused_updates or plan.chunked_loss is not None or plan.precision.has_masters:
        return "not bit for bit those without the plan"
    if plan.plain is not None and plan.plain.micro_batch_size not in (None, plan.micro_batch_size):
        return (
            f"those of the script with micro-batches of {plan.micro_batch_size}: beside those of "
            f"{plan.plain.micro_batch_size} sums are in another order, and what is worked out over a whole micro-batch "
            "(batch norm, a contrastive loss) sees fewer samples"
        )
    if plan.num_ranks > 1 and not plan.ranks:
        return "those without the plan, but for the order in which gradients are summed over ranks"
    return "bit for bit those without the plan"


def parts_text(plan: Plan) -> str:
    """`mlp.act to mlp.proj of blocks.0 to 2; mlp of blocks.3`: parts of units that run again by themselves."""
    units: dict[str, list[str]] = {}
    for unit in plan.units:
        if words := unit_parts_text(unit):
            units.setdefault(words, []).append(unit.name or "(model)")
    return "; ".join(f"{words} of {unit_ranges(names)}" for words, names in units.items())


def unit_parts_text(unit: UnitPlan) -> str:
    """`ln_2, mlp.act to mlp.proj`, by their names inside the unit."""
    inside = [[name.removeprefix(f"{unit.name}.") for name in part] for part in unit.parts]
    return ", ".join(" to ".join(dict.fromkeys((part[0], part[-1]))) for part in inside)


def kept_calls_text(unit: UnitPlan) -> str:
    """`but for calls 5 to 15`, counted from 0 between two backwards; nothing where all run again."""
    runs: list[list[int]] = []
    for call in unit.kept_calls:
        if runs and runs[-1][-1] == call - 1:
            runs[-1].append(call)
        else:
            runs.append([call])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"but for call{'s' * (len(unit.kept_calls) > 1)} {' and '.join(texts)}" if texts else ""


def ranks_text(plan: Plan) -> str:
    """`recomputed units by rank: 4 of 6, 0 of 6`."""
    own = [plan.of_rank(each.rank) for each in plan.ranks]
    counts = ", ".join(f"{len(each.recomputed_units)} of {len(each.units)}" for each in own)
    return f"recomputed units by rank: {counts}"


def _resolved(plan: Plan, units: Sequence[Unit]) -> Sequence[UnitPlan]:
    try:
        return resolve_units(plan, units)
    except PlanError:  # of a run that lost its units
        return plan.units
