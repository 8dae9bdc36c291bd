"""Plans as JSON, and as files."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from memadvisor.compression import Compression
from memadvisor.errors import PlanError
from memadvisor.executors import Algorithm
from memadvisor.local_sgd import LocalSgd
from memadvisor.plan import Plan, PlannedModel, Prediction, RankPlan, UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.precision import Precision
from memadvisor.run.files import write_output

FORMAT = 1

# What the first files of this format had, and every file has. All else is left out where it is as usual.
_OLDEST = frozenset(
    (
        "fingerprint",
        "num_ranks",
        "zero_stage",
        "policy",
        "units",
        "micro_batch_size",
        "grad_accum",
        "prediction",
        "budget_bytes",
        "why",
        "overlap",
        "gather_depth",
        "shard_ranks",
    )
)
_OLDEST_OF_UNIT = frozenset(("name", "zero_stage", "recompute", "reshard"))


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """What older versions do not know is left out where it is as they take it to be."""
    value = {"format": FORMAT, **dataclasses.asdict(plan)}
    value["units"] = [_unit_to_json(unit) for unit in plan.units]
    for written, rank in zip(value["ranks"], plan.ranks, strict=True):
        written["units"] = [_unit_to_json(unit) for unit in rank.units]
    for field in dataclasses.fields(plan):
        if field.name not in _OLDEST and getattr(plan, field.name) == field.default:
            del value[field.name]
    return value


def _unit_to_json(unit: UnitPlan) -> dict[str, Any]:
    return {
        field.name: getattr(unit, field.name)
        for field in dataclasses.fields(unit)
        if field.name in _OLDEST_OF_UNIT or getattr(unit, field.name) != field.default
    }


def plan_from_json(value: Any, source: str) -> Plan:
    """The inverse of `plan_to_json`. Raises PlanError, naming `source`, for anything that is no plan."""
    try:
        if value["format"] != FORMAT:
            raise PlanError(
                f"{source} has plan format {value['format']!r}, and this version reads {FORMAT}.",
                hint="make the plan again with `memadvisor advise`.",
            )
        prediction = value["prediction"]
        plan = Plan(
            fingerprint=_typed(value["fingerprint"], str, optional=True),
            num_ranks=_typed(value["num_ranks"], int),
            zero_stage=_typed(value["zero_stage"], int),
            policy=_typed(value["policy"], str),
            units=tuple(_unit_from_json(unit) for unit in value["units"]),
            overlap=(overlap := _typed(value.get("overlap", False), bool)),
            # Older plans have neither, or `overlap` alone, which then spoke for both.
            gather_depth=_typed(value.get("gather_depth", int(overlap)), int),
            precision=_precision_from_json(value.get("precision", {})),
            shard_ranks=_typed(value.get("shard_ranks"), int, optional=True),
            secondary_ranks=_typed(value.get("secondary_ranks"), int, optional=True),
            update_in_backward=_typed(value.get("update_in_backward", False), bool),
            compression=_compression_from_json(value.get("compression", {})),
            local_sgd=None if (local := value.get("local_sgd")) is None else _local_sgd_from_json(local),
            executor=_typed(value.get("executor", "built-in"), str),
            algorithms=tuple(_algorithm_from_json(entry) for entry in value.get("algorithms", [])),
            stretches=tuple((_typed(a, str), _typed(b, str)) for a, b in value.get("stretches", ())),
            optimizer_tier=_typed(value.get("optimizer_tier", "device"), str),
            activation_tier=_typed(value.get("activation_tier", "device"), str),
            activation_units=tuple(_typed(name, str) for name in value.get("activation_units", ())),
            activation_bits=_typed(value.get("activation_bits"), int, optional=True),
            compressed_units=tuple(_typed(name, str) for name in value.get("compressed_units", ())),
            disk_directory=_typed(value.get("disk_directory"), str, optional=True),
            optimizer_bits=_typed(value.get("optimizer_bits"), int, optional=True),
            parameter_tier=_typed(value.get("parameter_tier", "device"), str),
            delayed_update=_typed(value.get("delayed_update", False), bool),
            models=tuple(_model_from_json(model) for model in value.get("models", ())),
            ranks=tuple(_rank_from_json(rank) for rank in value.get("ranks", ())),
            ranks_alike=_typed(value.get("ranks_alike", False), bool),
            micro_batch_size=_typed(value["micro_batch_size"], int, optional=True),
            grad_accum=_typed(value["grad_accum"], int, optional=True),
            prediction=None if prediction is None else _prediction_from_json(prediction),
            budget_bytes=_typed(value["budget_bytes"], int, optional=True),
            why=_typed(value["why"], str),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(
            f"{source} is not a plan: {_what(error)}.",
            hint="make one with `memadvisor advise RUN -o plan.json`.",
        ) from error
    check_plan(plan, source)
    return plan


def load_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises PlanError when it is missing or no plan."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{str(path)!r} cannot be read: {error.strerror}.",
            hint="make a plan with `memadvisor advise RUN -o plan.json`.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{str(path)!r} is not JSON.", hint="make a plan with `memadvisor advise RUN -o plan.json`."
        ) from error
    return plan_from_json(value, repr(str(path)))


def save_plan(plan: Plan, path: Path, *, replace: bool = True) -> None:
    """Write a plan whole or not at all, readable by its owner alone. Raises UsageError."""
    write_output(path, json.dumps(plan_to_json(plan), indent=1) + "\n", replace=replace)


def _unit_from_json(value: Any) -> UnitPlan:
    return UnitPlan(
        name=_typed(value["name"], str),
        zero_stage=_typed(value["zero_stage"], int),
        recompute=_typed(value["recompute"], bool),
        reshard=_typed(value.get("reshard", True), bool),
        optimizer_tier=_typed(value.get("optimizer_tier", "device"), str),
        kept=tuple(_typed(name, str) for name in value.get("kept", ())),
        activation_tier=_typed(value.get("activation_tier", "device"), str),
        optimizer_bits=_typed(value.get("optimizer_bits"), int, optional=True),
        activation_bits=_typed(value.get("activation_bits"), int, optional=True),
        parameter_tier=_typed(value.get("parameter_tier", "device"), str),
        parts=tuple(tuple(_typed(name, str) for name in part) for part in value.get("parts", ())),
    )


def _rank_from_json(value: Any) -> RankPlan:
    prediction = value.get("prediction")
    return RankPlan(
        rank=_typed(value["rank"], int),
        fingerprint=_typed(value["fingerprint"], str),
        units=tuple(_unit_from_json(unit) for unit in value["units"]),
        models=tuple(_model_from_json(model) for model in value.get("models", ())),
        prediction=None if prediction is None else _prediction_from_json(prediction),
    )


def _model_from_json(value: Any) -> PlannedModel:
    return PlannedModel(
        name=_typed(value["name"], str),
        fingerprint=_typed(value["fingerprint"], str),
        is_trainable=_typed(value["is_trainable"], bool),
    )


def _prediction_from_json(value: Any) -> Prediction:
    return Prediction(
        peak_bytes=_typed(value["peak_bytes"], int),
        step_time_s=_seconds(value["step_time_s"]),
        by_category_bytes={str(name): _typed(size, int) for name, size in value["by_category_bytes"].items()},
        exposed_communication_s=_seconds(value["exposed_communication_s"]),
        peak_position=_typed(value["peak_position"], str),
        reserved_bytes=_typed(value.get("reserved_bytes"), int, optional=True),
        sent_bytes=_typed(value.get("sent_bytes"), int, optional=True),
        exposed_transfer_s=None
        if (waiting := value.get("exposed_transfer_s")) is None
        else _seconds(waiting),
        components_s=None
        if (parts := value.get("components_s")) is None
        else {str(name): _seconds(seconds) for name, seconds in parts.items()},
    )


def _precision_from_json(value: Any) -> Precision:
    return Precision(
        param_dtype=_typed(value.get("param_dtype"), str, optional=True),
        reduce_dtype=_typed(value.get("reduce_dtype"), str, optional=True),
        optimizer_dtype=_typed(value.get("optimizer_dtype"), str, optional=True),
    )


def _compression_from_json(value: Any) -> Compression:
    fields = (field.name for field in dataclasses.fields(Compression))
    return Compression(**{name: _typed(value.get(name), int, optional=True) for name in fields})


def _local_sgd_from_json(value: Any) -> LocalSgd:
    return LocalSgd(
        period=_typed(value["period"], int), warmup_steps=_typed(value.get("warmup_steps", 0), int)
    )


def _algorithm_from_json(value: Any) -> Algorithm:
    return Algorithm(
        operation=_typed(value["operation"], str),
        min_bytes=_typed(value["min_bytes"], int),
        name=_typed(value["name"], str),
        num_ranks=_typed(value.get("num_ranks"), int, optional=True),
    )


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{value!r} stands where seconds belong")
    return float(value)


def _typed(value: Any, kind: type, *, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{value!r} stands where {kind.__name__} belongs")
    return value


def _what(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
