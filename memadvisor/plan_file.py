"""Plans as JSON, and as files."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.compression import Compression
from memadvisor.errors import PlanError
from memadvisor.executors import Algorithm
from memadvisor.json_field import JsonField, read_json
from memadvisor.local_sgd import LocalSgd
from memadvisor.plan import LaneInterval, PlainRun, Plan, PlannedModel, Prediction, RankPlan, UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.precision import Precision
from memadvisor.run.files import write_output

FORMAT = 1
_LANES = ("compute", "collective", "host", "disk")  # schedule.Lane, which stands above plans
_MOST_S = sys.float_info.max  # a whole number beyond it is no float

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
        if rank.timeline is None:
            del written["timeline"]
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
    """The inverse of `plan_to_json`. Raises PlanError, naming `source` and the field, for anything that is no plan."""
    try:
        plan = _plan_from_json(JsonField(value), source)
    except ValueError as error:
        raise PlanError(
            f"{source} is not a plan: {error}.", hint="make one with `memadvisor advise RUN -o plan.json`."
        ) from error
    check_plan(plan, source)
    return plan


def _plan_from_json(value: JsonField, source: str) -> Plan:
    if (format_number := value["format"].value) != FORMAT:
        raise PlanError(
            f"{source} has plan format {format_number!r}, and this version reads {FORMAT}.",
            hint="make the plan again with `memadvisor advise`.",
        )
    return Plan(
        fingerprint=value["fingerprint"].typed(str, optional=True),
        num_ranks=value["num_ranks"].typed(int),
        zero_stage=value["zero_stage"].typed(int),
        policy=value["policy"].typed(str),
        units=tuple(_unit_from_json(unit) for unit in value["units"]),
        overlap=(overlap := value.get("overlap", False).typed(bool)),
        # Older plans have neither, or `overlap` alone, which then spoke for both.
        gather_depth=value.get("gather_depth", int(overlap)).typed(int),
        reduce_depth=value.get("reduce_depth", 1).typed(int),
        precision=_precision_from_json(value.get("precision", {})),
        shard_ranks=value.get("shard_ranks").typed(int, optional=True),
        secondary_ranks=value.get("secondary_ranks").typed(int, optional=True),
        update_in_backward=value.get("update_in_backward", False).typed(bool),
        update_by_unit=value.get("update_by_unit", False).typed(bool),
        compression=_compression_from_json(value.get("compression", {})),
        local_sgd=value.get("local_sgd").maybe(_local_sgd_from_json),
        executor=value.get("executor", "built-in").typed(str),
        reshard_model=value.get("reshard_model", False).typed(bool),
        algorithms=tuple(_algorithm_from_json(entry) for entry in value.get("algorithms", [])),
        stretches=tuple(_pair(stretch) for stretch in value.get("stretches", ())),
        optimizer_tier=value.get("optimizer_tier", "device").typed(str),
        activation_tier=value.get("activation_tier", "device").typed(str),
        activation_units=tuple(name.typed(str) for name in value.get("activation_units", ())),
        activation_bits=value.get("activation_bits").typed(int, optional=True),
        compressed_units=tuple(name.typed(str) for name in value.get("compressed_units", ())),
        disk_directory=value.get("disk_directory").typed(str, optional=True),
        optimizer_bits=value.get("optimizer_bits").typed(int, optional=True),
        parameter_tier=value.get("parameter_tier", "device").typed(str),
        delayed_update=value.get("delayed_update", False).typed(bool),
        fused_updates=value.get("fused_updates", False).typed(bool),
        chunked_loss=value.get("chunked_loss").maybe(_chunked_loss_from_json),
        autocast=value.get("autocast").typed(str, optional=True),
        models=tuple(_model_from_json(model) for model in value.get("models", ())),
        ranks=tuple(_rank_from_json(rank) for rank in value.get("ranks", ())),
        ranks_alike=value.get("ranks_alike", False).typed(bool),
        timeline=value.get("timeline").maybe(_timeline_from_json),
        plain=value.get("plain").maybe(_plain_from_json),
        micro_batch_size=value["micro_batch_size"].typed(int, optional=True),
        grad_accum=value["grad_accum"].typed(int, optional=True),
        prediction=value["prediction"].maybe(_prediction_from_json),
        budget_bytes=value["budget_bytes"].typed(int, optional=True),
        why=value["why"].typed(str),
    )


def load_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises PlanError when it is missing or no plan."""
    try:
        value = read_json(Path(path)).value
    except OSError as error:
        raise PlanError(
            f"{str(path)!r} cannot be read: {error.strerror}.",
            hint="make a plan with `memadvisor advise RUN -o plan.json`.",
        ) from error
    except ValueError as error:
        raise PlanError(
            f"{str(path)!r} is not JSON: {error}.",
            hint="make a plan with `memadvisor advise RUN -o plan.json`.",
        ) from error
    return plan_from_json(value, repr(str(path)))


def save_plan(plan: Plan, path: Path, *, replace: bool = True) -> None:
    """Write a plan whole or not at all, readable by its owner alone. Raises UsageError."""
    write_output(path, _json_text(plan), replace=replace)


def _json_text(plan: Plan) -> str:
    """The JSON, for readers too: of the timeline each interval is a line."""
    value = plan_to_json(plan)
    timeline = value.pop("timeline", None)
    text = json.dumps(value, indent=1)
    if timeline is not None:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in timeline)
        text = f'{text[:-2]},\n "timeline": [\n{rows}\n ]\n}}'
    return f"{text}\n"


def _unit_from_json(value: JsonField) -> UnitPlan:
    return UnitPlan(
        name=value["name"].typed(str),
        zero_stage=value["zero_stage"].typed(int),
        recompute=value["recompute"].typed(bool),
        reshard=value.get("reshard", True).typed(bool),
        optimizer_tier=value.get("optimizer_tier", "device").typed(str),
        kept=tuple(name.typed(str) for name in value.get("kept", ())),
        activation_tier=value.get("activation_tier", "device").typed(str),
        optimizer_bits=value.get("optimizer_bits").typed(int, optional=True),
        activation_bits=value.get("activation_bits").typed(int, optional=True),
        parameter_tier=value.get("parameter_tier", "device").typed(str),
        kept_calls=tuple(call.typed(int) for call in value.get("kept_calls", ())),
        parts=tuple(tuple(name.typed(str) for name in part) for part in value.get("parts", ())),
    )


def _rank_from_json(value: JsonField) -> RankPlan:
    return RankPlan(
        rank=value["rank"].typed(int),
        fingerprint=value["fingerprint"].typed(str),
        units=tuple(_unit_from_json(unit) for unit in value["units"]),
        models=tuple(_model_from_json(model) for model in value.get("models", ())),
        prediction=value.get("prediction").maybe(_prediction_from_json),
        timeline=value.get("timeline").maybe(_timeline_from_json),
    )


def _model_from_json(value: JsonField) -> PlannedModel:
    return PlannedModel(
        name=value["name"].typed(str),
        fingerprint=value["fingerprint"].typed(str),
        is_trainable=value["is_trainable"].typed(bool),
    )


def _prediction_from_json(value: JsonField) -> Prediction:
    return Prediction(
        peak_bytes=value["peak_bytes"].typed(int),
        step_time_s=_seconds(value["step_time_s"]),
        by_category_bytes={name: size.typed(int) for name, size in value["by_category_bytes"].items()},
        exposed_communication_s=_seconds(value["exposed_communication_s"]),
        peak_position=value["peak_position"].typed(str),
        reserved_bytes=value.get("reserved_bytes").typed(int, optional=True),
        sent_bytes=value.get("sent_bytes").typed(int, optional=True),
        exposed_transfer_s=value.get("exposed_transfer_s").maybe(_seconds),
        components_s=value.get("components_s").maybe(_seconds_by_name),
    )


def _precision_from_json(value: JsonField) -> Precision:
    return Precision(
        param_dtype=value.get("param_dtype").typed(str, optional=True),
        reduce_dtype=value.get("reduce_dtype").typed(str, optional=True),
        optimizer_dtype=value.get("optimizer_dtype").typed(str, optional=True),
    )


def _compression_from_json(value: JsonField) -> Compression:
    fields = (field.name for field in dataclasses.fields(Compression))
    return Compression(**{name: value.get(name).typed(int, optional=True) for name in fields})


def _local_sgd_from_json(value: JsonField) -> LocalSgd:
    return LocalSgd(period=value["period"].typed(int), warmup_steps=value.get("warmup_steps", 0).typed(int))


def _chunked_loss_from_json(value: JsonField) -> ChunkedLoss:
    return ChunkedLoss(
        layer=value.get("layer").typed(str, optional=True), rows=value.get("rows").typed(int, optional=True)
    )


def _algorithm_from_json(value: JsonField) -> Algorithm:
    return Algorithm(
        operation=value["operation"].typed(str),
        min_bytes=value["min_bytes"].typed(int),
        name=value["name"].typed(str),
        num_ranks=value.get("num_ranks").typed(int, optional=True),
    )


def _pair(value: JsonField) -> tuple[str, str]:
    names = tuple(name.typed(str) for name in value)
    if len(names) != 2:
        value.refuse("a pair of names")
    return names[0], names[1]


def _plain_from_json(value: JsonField) -> PlainRun:
    return PlainRun(
        peak_bytes=value["peak_bytes"].typed(int),
        step_time_s=_seconds(value["step_time_s"]),
        num_ranks=value["num_ranks"].typed(int),
        micro_batch_size=value["micro_batch_size"].typed(int, optional=True),
    )


def _timeline_from_json(value: JsonField) -> tuple[LaneInterval, ...]:
    return tuple(_interval(row) for row in value)


def _interval(value: JsonField) -> LaneInterval:
    fields = tuple(value)
    if len(fields) != len(LaneInterval._fields):
        value.refuse("a lane, what it does, and from when to when")
    lane, label, start, end = fields
    found = LaneInterval(lane.typed(str), label.typed(str), _seconds(start), _seconds(end))
    if found.lane not in _LANES:
        lane.refuse(f"one of {', '.join(_LANES)}")
    if found.end_s < found.start_s:
        end.refuse("no earlier than its start")
    return found


def _seconds_by_name(value: JsonField) -> dict[str, float]:
    return {name: _seconds(seconds) for name, seconds in value.items()}


def _seconds(value: JsonField) -> float:
    seconds = value.value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _MOST_S:
        value.refuse("a number of seconds")
    return float(seconds)
