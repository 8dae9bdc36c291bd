"""Optimizer steps of many small operators, where torch has one for all of an update (memadvisor/fused_updates.py)."""

from __future__ import annotations

from memadvisor.analyzers.altered_curve import moved_death
from memadvisor.analyzers.fused_step import is_fused, passes_in_update
from memadvisor.analyzers.script_changes.change import WORTH_OF_STEP, Facts, ScriptChange
from memadvisor.fused_updates import has_fused_update
from memadvisor.units import format_fraction, format_seconds

_OF_SPARSE = {"aten::_values", "aten::_indices", "aten::_coalesced_"}  # gradients that no fused update takes


def fused_updates(facts: Facts) -> ScriptChange | None:
    found = {state.optimizer for state in facts.rank.optimizer_states}
    operators = {operator.name for operator in facts.calls.operators if operator.phase == "optimizer"}
    if (
        not found
        or not all(name and has_fused_update(name) for name in found)
        or not operators
        or is_fused(facts.calls.operators)
        or operators & _OF_SPARSE
    ):
        return None
    saved_bytes = facts.peak_saved_bytes(
        change
        for storage in facts.calls.storages.values()
        if passes_in_update(storage)
        for change in moved_death(storage, storage.birth_s)
    )
    optimizer_s = None if facts.time is None else facts.time.by_phase_s["optimizer"]
    spends = facts.time is not None and (optimizer_s or 0.0) >= WORTH_OF_STEP * facts.time.median_s
    if not spends and not facts.is_worth(saved_bytes):
        return None
    name = sorted(str(each).rsplit(".", 1)[-1] for each in found)[0]
    share = (
        ""
        if facts.time is None or optimizer_s is None or not facts.time.median_s
        else f", {format_seconds(optimizer_s)}, {format_fraction(optimizer_s / facts.time.median_s)} of a step"
    )
    return ScriptChange(
        kind="fused_updates",
        seen=f"The optimizer's step runs in {_num_calls(facts)} operators{share}.",
        change=f"Write `{name}(..., fused=True)`; or have a plan do it: `--fused-updates` of `advise` and `run`.",
        peak_saved_bytes=max(0, saved_bytes),
        step_saved_s=optimizer_s,
        is_at_most=True,
        effect="not bit for bit the same",
    )


def _num_calls(facts: Facts) -> int:
    return sum(operator.phase == "optimizer" for operator in facts.calls.operators)
