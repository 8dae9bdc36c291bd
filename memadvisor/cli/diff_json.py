"""The stable JSON of `memadvisor diff --json`, defined key by key in docs/json.md."""

from __future__ import annotations

import dataclasses
from typing import Any

from memadvisor.analyzers.analysis import Analysis, run_to_json
from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.peak_difference import PeakUnitChange
from memadvisor.analyzers.run_difference import RankDifference, RunDifference, StepTimeChange
from memadvisor.analyzers.saved_difference import SavedTensorChange
from memadvisor.analyzers.step_time_shift import CONFIDENCE, Shift

_FIGURES = (
    "known_peak_bytes",
    "reserved_bytes",
    "num_params",
    "saved_bytes",
    "tokens_per_s",
    "samples_per_s",
    "model_flops_per_step",
    "executed_flops_per_step",
    "mfu",
    "hfu",
)


def difference_to_json(found: RunDifference) -> dict[str, Any]:
    return {
        "format": 1,
        "kind": "measured",
        "before": _run_to_json(found.before),
        "after": _run_to_json(found.after),
        "are_of_one_kind": found.are_of_one_kind,
        "settings": [dataclasses.asdict(setting) for setting in found.settings],
        "tokens_per_s": change_to_json(found.tokens_per_s),
        "samples_per_s": change_to_json(found.samples_per_s),
        "ranks": [_rank_to_json(rank) for rank in found.ranks],
        "ranks_only_before": list(found.ranks_only_before),
        "ranks_only_after": list(found.ranks_only_after),
    }


def _run_to_json(analysis: Analysis) -> dict[str, Any]:
    run = analysis.run
    return {
        **run_to_json(run),
        "missing_ranks": list(run.missing_ranks),
        "unfinished_ranks": [rank.rank for rank in analysis.unfinished_ranks],
        "problems": list(run.problems),
    }


def change_to_json(change: Change[Any]) -> dict[str, Any]:
    return {
        "before": change.before,
        "after": change.after,
        "difference": change.difference,
        "change_fraction": change.change_fraction,
    }


def _rank_to_json(rank: RankDifference) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        **{name: change_to_json(getattr(rank, name)) for name in _FIGURES},
        "peak": {
            "allocated_bytes": change_to_json(rank.peak_bytes),
            "position": dict(zip(("before", "after"), rank.peak_position, strict=True)),
            "by_category_bytes": {
                name: change_to_json(change) for name, change in rank.by_category_bytes.items()
            },
            "units": None
            if rank.peak_units is None
            else [_peak_unit_to_json(row) for row in rank.peak_units],
        },
        "model_states": {name: change_to_json(change) for name, change in rank.model_states.items()},
        "step_time": _step_time_to_json(rank.step_time),
        "communication": {
            "bytes": change_to_json(rank.communication_bytes),
            "num_calls": change_to_json(rank.num_collectives),
            **{name: change_to_json(change) for name, change in rank.communication_s.items()},
            "exposed_fraction": change_to_json(rank.exposed_fraction),
        },
        "modules": None
        if rank.modules is None
        else [
            {"name": row.name, "only_in": row.only_in or None, "saved_bytes": change_to_json(row.saved_bytes)}
            for row in rank.modules
        ],
        "saved_tensors": None
        if rank.saved_tensors is None
        else [_saved_tensor_to_json(row) for row in rank.saved_tensors],
        "operators": None
        if rank.operators is None
        else [
            {
                "name": row.name,
                "num_calls": change_to_json(row.num_calls),
                "time_s": change_to_json(row.time_s),
            }
            for row in rank.operators
        ],
    }


def _peak_unit_to_json(row: PeakUnitChange) -> dict[str, Any]:
    return {
        "unit": row.unit,
        "size_bytes": change_to_json(row.size_bytes),
        "by_category_bytes": {name: change_to_json(change) for name, change in row.by_category_bytes.items()},
    }


def _saved_tensor_to_json(row: SavedTensorChange) -> dict[str, Any]:
    return {
        "module": row.module,
        "operator": row.operator,
        "dtype": row.dtype,
        "shape": row.shape,
        "size_bytes": row.size_bytes,
        "num_kept": change_to_json(row.num_kept),
        "saved_bytes": change_to_json(row.saved_bytes),
    }


def _step_time_to_json(time: StepTimeChange) -> dict[str, Any]:
    return {
        "median_s": change_to_json(time.median_s),
        "num_steady_steps": change_to_json(time.num_steps),
        "quartiles_s": {
            side: None if found is None else list(found)
            for side, found in zip(("before", "after"), time.quartiles_s, strict=True)
        },
        "test": None if time.shift is None else _shift_to_json(time.shift),
        "by_phase_s": {name: change_to_json(change) for name, change in time.by_phase_s.items()},
        "data_wait_s": change_to_json(time.data_wait_s),
    }


def _shift_to_json(shift: Shift) -> dict[str, Any]:
    return {
        "name": "Mann-Whitney",
        "confidence": CONFIDENCE,
        "shift_s": shift.shift_s,
        "interval_s": None if shift.interval_s is None else list(shift.interval_s),
        "num_before": shift.num_before,
        "num_after": shift.num_after,
        "is_significant": shift.is_significant,
    }
