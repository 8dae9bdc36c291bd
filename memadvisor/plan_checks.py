"""What no plan may ask for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memadvisor.activation_bits import BITS
from memadvisor.autocast import check_autocast_of
from memadvisor.chunked_loss import check_chunked_loss
from memadvisor.coded_states import check_optimizer_bits
from memadvisor.compression import check_compression
from memadvisor.errors import PlanError
from memadvisor.executors import check_executor
from memadvisor.local_sgd import check_local_sgd
from memadvisor.plan import TIERS, Plan, UnitPlan
from memadvisor.policies import RECOMPUTING
from memadvisor.precision import check_precision
from memadvisor.stretches import check_stretches
from memadvisor.units import counted
from memadvisor.update_checks import check_updates

# What the plan as a whole and each of its units may have.
_CHOICES = {
    "zero_stage": (0, 1, 2, 3),
    "optimizer_tier": TIERS,
    "activation_tier": TIERS,
    "parameter_tier": TIERS,
    "activation_bits": (None, *BITS),
    "optimizer_bits": (None, 8),
}
_OPERATOR = re.compile(r"\w+::\w+(#\d+)?", re.ASCII)


def check_plan(plan: Plan, source: str) -> None:
    """Raise PlanError, naming `source`, for a plan that nothing could be done with."""
    _check_choices(plan, source)
    stages = {plan.zero_stage, *(unit.zero_stage for unit in plan.units)}
    _check_values(plan, stages, source)
    check_autocast_of(plan, source)
    _check_ranks(plan, source)
    _check_sums(plan, stages, source)
    _check_executor(plan, stages, source)
    gathered = {unit.name: unit.zero_stage == 3 and plan.num_ranks > 1 for unit in plan.units}
    check_stretches(plan.stretches, gathered, source)
    _check_kept(plan, source)
    _check_kept_calls(plan, source)
    _check_parts(plan, source)
    _check_offload(plan, source)
    _check_activation_bits(plan, source)
    check_updates(plan, stages, source)
    _check_parameter_tiers(plan, source)
    check_chunked_loss(
        plan.chunked_loss,
        {
            "FSDP2 takes them back after the forward": plan.executor != "built-in",
            "a rank has parts of layers, or of the model, alone": bool(plan.ranks),
            "it computes in another dtype": plan.precision.param_dtype is not None,
            "it updates in the backward": plan.update_in_backward,
            "it updates one step late": plan.delayed_update,
        },
        source,
    )
    check_optimizer_bits(
        plan.optimizer_codes,
        {
            "updates in the backward": plan.update_in_backward,
            "keeps optimizer state on host or disk": plan.optimizer_tiers != {"device"},
        },
        source,
    )


def _check_choices(plan: Plan, source: str) -> None:
    for place, whose in (("", plan), *((f"units[{at}].", unit) for at, unit in enumerate(plan.units))):
        for field, allowed in _CHOICES.items():
            value = getattr(whose, field)
            if value not in allowed:
                of_unit = f" of {whose.name!r}" if isinstance(whose, UnitPlan) else ""
                raise PlanError(
                    f"{source} has {place}{field} {value!r}{of_unit}.",
                    hint=f"use {', '.join(str(each) for each in allowed if each is not None)}.",
                )


def _check_values(plan: Plan, stages: set[int], source: str) -> None:
    """Each by itself, and against the number of ranks."""
    if plan.num_ranks < 1:
        raise PlanError(
            f"{source} is for {counted(plan.num_ranks, 'rank')}.", hint="a plan is for 1 rank or more."
        )
    if plan.policy not in ("chosen", "none", *RECOMPUTING):
        raise PlanError(
            f"{source} names the policy {plan.policy!r}.",
            hint=f"use chosen, none, {', '.join(RECOMPUTING)}.",
        )
    if plan.policy == "kwai" and plan.activation_tier == "device":
        raise PlanError(
            f"{source} has the policy kwai, which moves what it does not recompute, and no tier for it.",
            hint="say where: --offload-activations disk or host (activation_tier of a plan).",
        )
    if plan.gather_depth < 0:
        raise PlanError(f"{source} has gather_depth {plan.gather_depth}.", hint="it must be 0 or more.")
    if plan.reduce_depth < 1:
        raise PlanError(f"{source} has reduce_depth {plan.reduce_depth}.", hint="it must be 1 or more.")
    if plan.reduce_depth > 1 and not (plan.overlap and plan.num_ranks > 1 and max(stages) >= 2):
        raise PlanError(
            f"{source} has reduce_depth {plan.reduce_depth}, and no reductions to shards under the backward.",
            hint="it needs several ranks, overlap, and ZeRO stage 2 or 3; leave it out.",
        )
    if plan.shard_ranks is not None and not (
        2 <= plan.shard_ranks <= plan.num_ranks and plan.num_ranks % plan.shard_ranks == 0
    ):
        raise PlanError(
            f"{source} has shard_ranks {plan.shard_ranks} for {counted(plan.num_ranks, 'rank')}.",
            hint="it must be 2 or more, and divide the number of ranks.",
        )
    _check_second_copies(plan, stages, source)
    if (twice := _named_twice([unit.name for unit in plan.units])) is not None:
        raise PlanError(f"{source} names the unit {twice!r} twice.", hint="name each unit once.")
    _check_models(plan, source)
    for field in ("micro_batch_size", "grad_accum", "budget_bytes"):
        value = getattr(plan, field)
        if value is not None and value < 1:
            raise PlanError(f"{source} has {field} {value}.", hint="it must be 1 or more.")


def _named_twice(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _check_sums(plan: Plan, stages: set[int], source: str) -> None:
    """In what precision, in which bits and how often ranks sum."""
    check_precision(plan.precision, plan.num_ranks, stages, source)
    if plan.compression.has_feedback and plan.group_ranks < plan.num_ranks:
        raise PlanError(
            f"{source} compresses gradients that stay whole, and has shard_ranks {plan.shard_ranks}.",
            hint="leave one of them out.",
        )
    check_compression(plan.compression, plan.num_ranks, stages, source, plan.precision.reduce_dtype)
    check_local_sgd(
        plan.local_sgd,
        plan.num_ranks,
        stages,
        {
            "compressed gradients": plan.compression.is_lossy,
            f"shard_ranks {plan.shard_ranks}": plan.shard_ranks is not None,
        },
        source,
    )


def _check_executor(plan: Plan, stages: set[int], source: str) -> None:
    asked = {
        f"ZeRO stage {min(stages)}": stages != {3},
        "one rank": plan.num_ranks == 1,
        **beside_fsdp2(replace(plan, secondary_ranks=None)),  # those of the script
    }
    check_executor(plan.executor, plan.algorithms, asked, source)
    if plan.reshard_model and plan.executor != "fsdp2":
        raise PlanError(
            f"{source} has reshard_model for {plan.executor}.",
            hint="FSDP2 alone has a group of the model's own.",
        )
    if plan.update_in_backward and plan.executor != "built-in":
        raise PlanError(
            f"{source} updates in the backward by {plan.executor}.",
            hint="the built-in engine alone does that.",
        )


def _check_second_copies(plan: Plan, stages: set[int], source: str) -> None:
    ranks = plan.secondary_ranks
    if ranks is None:
        return
    is_of_fsdp2 = plan.executor == "fsdp2"  # whose parts are of what a group of ranks shares
    most = plan.group_ranks if is_of_fsdp2 else plan.num_ranks
    if not (2 <= ranks < most and most % ranks == 0):
        raise PlanError(
            f"{source} has secondary_ranks {ranks} for {counted(most, 'rank')}.",
            hint="it must be 2 or more, fewer than all ranks, and divide their number.",
        )
    if 3 not in stages:
        raise PlanError(
            f"{source} has secondary_ranks {ranks} with ZeRO stage {max(stages)}.",
            hint="stage 3 alone gathers for the backward: use it, or leave them out.",
        )
    if plan.group_ranks < plan.num_ranks and not is_of_fsdp2:
        raise PlanError(
            f"{source} has secondary_ranks {ranks}, and shard_ranks {plan.shard_ranks}.",
            hint="leave one of them out.",
        )


def _check_parameter_tiers(plan: Plan, source: str) -> None:
    away = [unit for unit in plan.units if unit.parameter_tier != "device"]
    if plan.parameter_tier != "device":
        away.append(
            UnitPlan(
                name="",
                zero_stage=plan.zero_stage,
                recompute=False,
                optimizer_tier=plan.optimizer_tier,
                parameter_tier=plan.parameter_tier,
            )
        )
    if not away:
        return
    where = f"{source} has parameters{f' of {away[0].name!r}' if away[0].name else ''} on the {away[0].parameter_tier}"
    if plan.num_ranks > 1:
        raise PlanError(
            f"{where}, and is for {counted(plan.num_ranks, 'rank')}.",
            hint="ranks share them by ZeRO stage 3 alone.",
        )
    if any(unit.zero_stage != 3 for unit in away):
        raise PlanError(f"{where}, and is not of ZeRO stage 3 there.", hint="give such units zero_stage 3.")
    if any(unit.optimizer_tier != unit.parameter_tier for unit in away):
        raise PlanError(
            f"{where}, and optimizer state elsewhere.", hint="give such units the same optimizer_tier."
        )
    if plan.stretches:
        raise PlanError(
            f"{where}, and stretches of units that run again as one.", hint="recompute units by themselves."
        )


def _check_models(plan: Plan, source: str) -> None:
    if not plan.models:
        return
    if (twice := _named_twice([model.name for model in plan.models])) is not None:
        raise PlanError(f"{source} names the model {twice!r} twice.", hint="name each model once.")
    strange = [unit.name for unit in plan.units if plan.model_of(unit.name) is None]
    if strange:
        raise PlanError(
            f"{source} has the unit {strange[0]!r}, of none of its models.",
            hint="make the plan again with `memadvisor advise`.",
        )
    across = [pair for pair in plan.stretches if plan.model_of(pair[0]) != plan.model_of(pair[1])]
    if across:
        raise PlanError(
            f"{source} has a stretch from {across[0][0]!r} to {across[0][1]!r}, which are of two models.",
            hint="end it with its model.",
        )
    if len(plan.models) > 1 and plan.parameter_tiers != {"device"}:
        raise PlanError(
            f"{source} has parameters of {len(plan.models)} models on host or disk.",
            hint="the engine does that for one model.",
        )


def _check_ranks(plan: Plan, source: str) -> None:
    """Of a plan with choices by rank."""
    if not plan.ranks:
        if plan.ranks_alike:
            raise PlanError(
                f"{source} has ranks alike, and says of none what it does.", hint="name them in `ranks`."
            )
        return
    if [own.rank for own in plan.ranks] != list(range(plan.num_ranks)):
        raise PlanError(
            f"{source} says what ranks {', '.join(str(own.rank) for own in plan.ranks)} do, of {plan.num_ranks}.",
            hint="name each rank once, in order.",
        )
    alike = replace(plan, ranks=(), ranks_alike=False)
    usual = Plan(num_ranks=plan.num_ranks, zero_stage=0, policy="chosen")
    told = ("prediction", "budget_bytes", "why", "plain", "timeline")
    settable = (*told, "micro_batch_size", "grad_accum", "disk_directory")
    if replace(alike, **{name: getattr(usual, name) for name in settable}) != usual:
        raise PlanError(
            f"{source} has choices by rank, and others beside them.",
            hint="such a plan recomputes units on each rank, or moves their activations, and does nothing else.",
        )
    other = next((own.rank for own in plan.ranks if own.units != plan.ranks[0].units), None)
    if plan.ranks_alike and other is not None:
        raise PlanError(
            f"{source} has rank {other} recompute other units than rank 0, and these ranks split layers: they would wait for "
            "each other's collectives for ever.",
            hint="give all of them the same `units`.",
        )
    for own in plan.ranks:
        if any(unit.zero_stage or replace(unit, activation_tier="device").elsewhere for unit in own.units):
            raise PlanError(
                f"{source} has rank {own.rank} share or round something, or move states.",
                hint="ranks that have models of their own only recompute units, and move activations.",
            )
        check_plan(plan.of_rank(own.rank), f"{source}, rank {own.rank},")


def _check_kept(plan: Plan, source: str) -> None:
    stretched = {name for stretch in plan.unit_stretches for name in stretch}
    for unit in plan.units:
        if unit.kept and not (unit.recompute and unit.name not in stretched):
            raise PlanError(
                f"{source} keeps operators of {unit.name!r}, which is not recomputed by itself.",
                hint="let it be recomputed alone, or leave out what it keeps.",
            )
        for name in unit.kept:
            if not _OPERATOR.fullmatch(name):
                raise PlanError(
                    f"{source} keeps {name!r} of {unit.name!r}.",
                    hint="name an operator as in aten::addmm, or one call of it as in aten::addmm#0.",
                )


def _check_kept_calls(plan: Plan, source: str) -> None:
    stretched = {name for stretch in plan.unit_stretches for name in stretch}
    for unit in (*plan.units, *(unit for own in plan.ranks for unit in own.units)):
        calls = unit.kept_calls
        if not calls:
            continue
        if not unit.recompute or unit.name in stretched or plan.ranks:
            raise PlanError(
                f"{source} keeps calls of {unit.name!r}, which is not recomputed by itself, and alike on all ranks.",
                hint="let it be recomputed alone, or leave out its kept_calls.",
            )
        if min(calls) < 0 or list(calls) != sorted(set(calls)):
            raise PlanError(
                f"{source} keeps calls {list(calls)} of {unit.name!r}.",
                hint="give their numbers, from 0 on, in rising order.",
            )
        if unit.kept or unit.parts or unit.activation_tier != "device" or unit.activation_bits is not None:
            raise PlanError(
                f"{source} keeps calls of {unit.name!r}, and operators, parts or activations elsewhere.",
                hint="leave one of them out.",
            )


def _check_parts(plan: Plan, source: str) -> None:
    stretched = {name for stretch in plan.unit_stretches for name in stretch}
    for unit in plan.units:
        modules = [name for part in unit.parts for name in part]
        prefix = f"{unit.name}." if unit.name else ""
        strange = [name for name in modules if not name.startswith(prefix) or name == unit.name]
        if strange or len(set(modules)) < len(modules) or () in unit.parts:
            what = f"the part {strange[0]!r}" if strange else "empty parts, or parts that share modules"
            raise PlanError(
                f"{source} has {what} of {unit.name!r}.", hint="name modules inside the unit, each once."
            )
        beside = {
            "the script's own FSDP2": plan.executor == "fsdp2",
            "a stretch around it": unit.name in stretched,
            "operators that it keeps": bool(unit.kept),
            "what it keeps elsewhere, or in few bits": bool(unit.elsewhere),
        }
        if unit.parts and (found := [what for what, is_so in beside.items() if is_so]):
            raise PlanError(
                f"{source} has parts of {unit.name!r} that run again, with {found[0]}.",
                hint="leave one of them out.",
            )


def _check_offload(plan: Plan, source: str) -> None:
    away = {unit.name for unit in plan.units if unit.activation_tier != "device"}
    again = {name for stretch in plan.unit_stretches for name in stretch}
    if away & again:
        raise PlanError(
            f"{source} offloads {min(away & again)!r}, which is in a stretch of units that run again as one.",
            hint="recompute such a unit by itself, or leave it on the device.",
        )


def _check_activation_bits(plan: Plan, source: str) -> None:
    both = [unit.name for unit in plan.units if unit.activation_bits and unit.activation_tier != "device"]
    if both or (plan.activation_bits and plan.activation_tier != "device"):
        whose = f"of {both[0]!r} " if both else ""
        raise PlanError(
            f"{source} rounds activations {whose}and offloads them too.", hint="leave one of them out."
        )
    again = set(plan.recomputed_units)
    lost = [unit.name for unit in plan.units if unit.activation_bits and unit.name in again]
    if lost:
        raise PlanError(
            f"{source} rounds activations of {lost[0]!r}, which is recomputed and keeps its input alone, exactly.",
            hint="leave one of them out.",
        )


def beside_fsdp2(plan: Plan) -> dict[str, bool]:
    """What FSDP2 is not told by a plan, in words, and whether this one asks for it."""
    return {
        "another precision": plan.precision.is_lossy or plan.precision.has_masters,
        "compressed messages": plan.compression.is_lossy,
        "local SGD": plan.local_sgd is not None,
        "autocast": plan.autocast is not None,
        "second copies of shards": plan.secondary_ranks is not None,
        "updates in the backward": plan.update_in_backward,
        "several reductions under way": plan.reduce_depth > 1,
        "parameters on host or disk": plan.parameter_tiers != {"device"},
        "updates one step late": plan.delayed_update,
    }
