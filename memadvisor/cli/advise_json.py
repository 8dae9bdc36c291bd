"""An advice as the stable JSON of `memadvisor advise --json`."""

from __future__ import annotations

import dataclasses
from typing import Any

from memadvisor.planning.advise import Advice
from memadvisor.planning.ranked import RankedPlan


def advice_to_json(advice: Advice) -> dict[str, Any]:
    """The stable JSON of docs/architecture.md. `p_oom` is null: the simulator states no error distribution."""
    return {
        "budget_bytes": advice.budget_bytes,
        "plans": [_plan_to_json(order, ranked) for order, ranked in enumerate(advice.plans, start=1)],
        "smallest_budget_bytes": advice.smallest_budget_bytes,
        "smallest_unchanged_bytes": advice.smallest_unchanged_bytes,
        "measured": {"peak_bytes": advice.measured_peak_bytes, "step_time_s": advice.measured_step_time_s},
        "micro_batch": {"asked": advice.micro_batch, "recorded": advice.recorded_micro_batch},
        "notes": list(advice.notes),
        "front": [
            {
                "predicted_peak_bytes": point.peak_bytes,
                "predicted_step_time_s": point.step_time_s,
                "zero_stage": point.zero_stage,
                "num_recomputed": point.num_recomputed,
                "num_parted": point.num_parted,
                "num_offloaded": point.num_offloaded,
            }
            for point in advice.front
        ],
        "next_gib_s": advice.next_gib_s,
        "script_changes": [dataclasses.asdict(change) for change in advice.script_changes],
        "learnt": None if advice.learnt is None else dataclasses.asdict(advice.learnt),
        "policy": None
        if advice.named is None
        else {"name": advice.policy, **_plan_to_json(None, advice.named)},
        "lossy": [
            {
                "option": each.option,
                "predicted_peak_bytes": each.peak_bytes,
                "predicted_step_time_s": each.step_time_s,
            }
            for each in advice.lossy
        ],
    }


def _plan_to_json(order: int | None, ranked: RankedPlan) -> dict[str, Any]:
    plan, prediction = ranked.plan, ranked.prediction
    return {
        "rank_order": order,
        "fits": ranked.fits,
        "predicted_peak_bytes": prediction.peak_bytes,
        "predicted_reserved_bytes": prediction.reserved_bytes,
        "predicted_by_category_bytes": prediction.by_category_bytes,
        "predicted_step_time_s": prediction.step_time_s,
        "predicted_exposed_communication_s": prediction.exposed_communication_s,
        "predicted_sent_bytes": prediction.sent_bytes,
        "peak_position": prediction.peak_position,
        "p_oom": None,
        "zero_stage": plan.zero_stage,
        "recompute": list(plan.recomputed_units),
        "parts": {unit.name: [list(part) for part in unit.parts] for unit in plan.units if unit.parts},
        "stretches": [list(stretch) for stretch in plan.stretches],
        "offload": {
            "parameters": {u.name: u.parameter_tier for u in plan.units if u.parameter_tier != "device"},
            "optimizer_state": {u.name: u.optimizer_tier for u in plan.units if u.optimizer_tier != "device"},
            "activations": {u.name: u.activation_tier for u in plan.units if u.activation_tier != "device"},
        },
        "predicted_exposed_transfer_s": prediction.exposed_transfer_s,
        "micro_batch_size": plan.micro_batch_size,
        "grad_accum": plan.grad_accum,
        "overlap": plan.overlap,
        "gather_depth": plan.gather_depth,
        "reduce_depth": plan.reduce_depth,
        "update_in_backward": plan.update_in_backward,
        "update_by_unit": plan.update_by_unit,
        "fused_updates": plan.fused_updates,
        "chunked_loss": None if plan.chunked_loss is None else dataclasses.asdict(plan.chunked_loss),
        "autocast": plan.autocast,
        "secondary_ranks": plan.secondary_ranks,
        "executor": plan.executor,
        "units": [dataclasses.asdict(unit) for unit in plan.units],
        "precision": dataclasses.asdict(plan.precision),
        "compression": dataclasses.asdict(plan.compression),
        "local_sgd": None if plan.local_sgd is None else dataclasses.asdict(plan.local_sgd),
        "layout": {"data_parallel": plan.num_ranks, "shard_ranks": plan.group_ranks},
        "why": plan.why,
    }
