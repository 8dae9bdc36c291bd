"""Policies by name, beside what the search chooses: none, every-layer, sqrt, selective, kwai and dtr.

All but the last are those of plans made by hand (memadvisor/policies.py). Of `kwai`, Megatron-Kwai (Yuan et al., ATC
2024) moves as large a share of what a layer keeps as goes under the next layer's forward: here the blocks of which all
of it does, and comes back under that one's backward. `dtr` lets go of units in the order of Dynamic
Tensor Rematerialization (Kirisame et al., ICLR 2021, arXiv:2006.09616, section 3), which evicts what has the least

    h = cost / (bytes * staleness)

where memory runs out: here the units of which the highest moment of the simulated step has kept something from their
forward, with the seconds that running them again costs, the bytes that frees, and the seconds since the forward that
made them has ended. One unit after another goes until the budget holds; DTR itself decides while the training runs, and
tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import accumulate

from memadvisor.cost.moments import Moment
from memadvisor.cost.step import CapturedStep
from memadvisor.errors import UsageError
from memadvisor.plan import UnitPlan
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.offload import hidden_transfers
from memadvisor.planning.operators import products_of
from memadvisor.planning.paging import nearest_tier
from memadvisor.planning.plays import Plays
from memadvisor.planning.ranked import RankedPlan
from memadvisor.policies import KEEPING, RECOMPUTING, blocks_of, recomputed_by_policy
from memadvisor.units import format_bytes

POLICIES = ("none", *RECOMPUTING, "dtr")


def check_policy(policy: str | None) -> None:
    """Raise UsageError for a name that is none."""
    if policy is not None and policy not in POLICIES:
        raise UsageError(f"There is no policy {policy!r}.", hint=f"policies are {', '.join(POLICIES)}.")


def named_plan(plays: Plays, step: CapturedStep, policy: str, first: RankedPlan) -> RankedPlan:
    """The plan of a policy, sharded as the first plan is. Raises UsageError where it cannot be had in the budget."""
    plan = first.plan
    like = Arrangement(
        plan.units,
        plan.behind,
        plan.gather_depth,
        plan.shard_ranks,
        plan.update_in_backward,
        by_unit=plan.update_by_unit,
    )

    def highest(arrangement: Arrangement) -> Moment:
        return plays.play(step, arrangement).peak

    if policy == "dtr":
        chosen = _evicted(step, _with(like, frozenset()), highest, plays.budget_bytes)
    else:
        _check_predictable(plays, step, policy)
        again = recomputed_by_policy(policy, blocks_of(step.units)) & set(step.recomputable)
        kept = {unit: products_of(step, unit) for unit in again} if policy in KEEPING else {}
        chosen = _with(like, again, kept)
        chosen = _moved(plays, step, chosen) if policy == "kwai" else chosen
    found = plays.ranked(step, chosen, plays.play(step, chosen).prediction())
    needed_bytes = found.prediction.needed_bytes
    if not found.fits:
        raise UsageError(
            f"The policy {policy} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes), and the budget is "
            f"{format_bytes(plays.budget_bytes)}.",
            hint="advise without --policy, or give more --memory.",
        )
    return found


def _check_predictable(plays: Plays, step: CapturedStep, policy: str) -> None:
    """Raise UsageError where a policy has nothing to choose from, or what it gives is not known."""
    if policy in KEEPING and plays.settings is not None:
        raise UsageError(
            f"What the policy {policy} reserves on a CUDA device is not predicted.",
            hint="take another policy, or advise without --policy.",
        )
    if policy in KEEPING and not step.operators:
        raise UsageError(
            f"The run does not tell what keeping outputs of operators would cost, which the policy {policy} does.",
            hint="profile the script again with this version, or take --policy every-layer.",
        )
    if policy != "none" and not blocks_of(step.units):
        raise UsageError(
            f"The policy {policy} recomputes blocks, and the model has none: no two modules of one class stand side by "
            "side.",
            hint="advise without --policy, or take --policy dtr.",
        )


def _moved(plays: Plays, step: CapturedStep, keeping: Arrangement) -> Arrangement:
    """With what the blocks keep on another tier, where its transfers are hidden."""
    tier = nearest_tier(step, plays.transfers)
    if tier is None or plays.transfers is None:
        raise UsageError(
            "The policy kwai moves what it does not recompute, and no bandwidth of another tier is known.",
            hint="measure it with `memadvisor calibrate -o hardware.json`, and pass --hardware hardware.json.",
        )

    def away(names: Collection[str]) -> Arrangement:
        moves = (replace(u, activation_tier=tier) if u.name in names else u for u in keeping.units)
        return replace(keeping, units=tuple(moves))

    hidden = hidden_transfers(step, away(keeping.recomputed).units, plays.transfers)
    if not hidden:
        raise UsageError(
            "The policy kwai would move nothing: of no block do the transfers fit under the next one's compute "
            f"({plays.transfers.source}).",
            hint="take --policy selective, or a faster tier.",
        )
    return away(hidden)


def _with(
    like: Arrangement, recomputed: frozenset[str], kept: Mapping[str, tuple[str, ...]] | None = None
) -> Arrangement:
    units = (
        replace(
            unit,
            recompute=unit.name in recomputed,
            kept=(kept or {}).get(unit.name, ()),
            activation_tier="device",
        )
        for unit in like.units
    )
    return replace(like, units=tuple(units), stretches=())


def _evicted(
    step: CapturedStep, plain: Arrangement, highest: Callable[[Arrangement], Moment], budget_bytes: int
) -> Arrangement:
    evicted: frozenset[str] = frozenset()
    while True:
        arrangement = _with(plain, evicted)
        moment = highest(arrangement)
        candidates = _scores(step, plain.units, evicted, moment.segment)
        if moment.total_bytes <= budget_bytes or not candidates:
            return arrangement
        evicted |= {min(candidates, key=lambda unit: (candidates[unit], unit))}


def _scores(
    step: CapturedStep, units: tuple[UnitPlan, ...], evicted: frozenset[str], position: int
) -> dict[str, float]:
    """h of the units that may go, by name: those that keep something while segment `position` runs."""
    ends_s = list(accumulate(segment.duration_s for segment in step.segments))
    scores: dict[str, float] = {}
    for unit in units:
        kept = [
            item
            for item in step.inner
            if item.unit == unit.name and item.birth_segment < position <= item.death_segment
        ]
        size_bytes = sum(item.size_bytes for item in kept)
        if unit.name in evicted or unit.name not in step.recomputable or not size_bytes:
            continue
        made_s = max(ends_s[item.birth_segment] for item in kept)
        staleness_s = ends_s[position] - made_s
        cost_s = step.recomputable[unit.name] / step.num_micro_batches
        scores[unit.name] = cost_s / (size_bytes * staleness_s) if staleness_s > 0 else float("inf")
    return scores
