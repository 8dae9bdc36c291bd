"""A plan: what to change about a training, and what that is predicted to give. Pure data, kept as JSON.

A plan names units of one model (memadvisor/run/cut.py) and says for each its ZeRO stage and whether
its forward is recomputed in the backward. The model's fingerprint keeps it from being applied to another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memadvisor.compression import UNCOMPRESSED, Compression, check_compression
from memadvisor.errors import PlanError, UsageError
from memadvisor.executors import Algorithm, check_executor
from memadvisor.precision import FULL_PRECISION, Precision, check_precision
from memadvisor.run.files import write_private_file
from memadvisor.stretches import check_stretches, units_of_stretches

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """`zero_stage` 0 replicates everything, 1 shards optimizer state, 2 gradients too, 3 parameters too.

    `reshard`: with stage 3, the full parameters are freed after the forward and gathered again for the
    backward; without it they stay from the forward until the unit's backward is over.
    """

    name: str
    zero_stage: int
    recompute: bool
    reshard: bool = True

    @property
    def is_kept(self) -> bool:
        """Whether sharded parameters stay from the forward until the backward is over."""
        return self.zero_stage == 3 and not self.reshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan, per rank; the largest rank where ranks differ.

    `reserved_bytes`: what a CUDA device's caching allocator holds at most; None for other devices. `sent_bytes`: what
    a rank sends in a step; None in plans of versions that did not count it.
    """

    peak_bytes: int
    step_time_s: float
    by_category_bytes: dict[str, int]  # at the peak
    exposed_communication_s: float
    peak_position: str  # "backward of blocks.3", where the peak is
    reserved_bytes: int | None = None
    sent_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """What a budget must hold: the reservation where there is one, else the peak."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`units` empty: a plan made by hand, whose `zero_stage` and `policy` are worked out on the live model.

    `gather_depth`: how many units of stage 3 are gathered ahead of the one that runs. `overlap`: gradients are
    reduced to shards one unit behind, and parameters that stages 1 and 2 have updated are gathered under the next
    forward. But for the latter, both cost the memory of what is under way; what stays whole on every rank is
    reduced under the backward in any case.
    `shard_ranks`: how many ranks that follow each other share what is sharded; every such group holds all of it,
    and groups add up their gradients (hybrid sharding). None: all ranks are one group.
    `update_in_backward`: units of stages 2 and 3 are updated, and their gradients freed, as soon as those are reduced.
    `executor`: whose memory and time the prediction is of. `fsdp2`: the script shards its model with `fully_shard`
    and keeps that; units of a group that FSDP2 gathers together are freed after the forward if all of them `reshard`.
    `algorithms`: how collectives go; empty, as is usual on the backend.
    `stretches`: first and last names of runs of units of which only the first one's input is kept, and whose forwards
    run again, as one, before the last one's backward; they nest, and a unit's own `recompute` is the innermost.
    `micro_batch_size` and `grad_accum` are the script's own settings that the prediction assumes; None
    leaves them as they are.
    """

    fingerprint: str | None = None
    num_ranks: int
    zero_stage: int
    policy: str = "none"  # "chosen" (see units), "none", "every-layer" or "sqrt"
    units: tuple[UnitPlan, ...] = ()
    micro_batch_size: int | None = None
    grad_accum: int | None = None
    prediction: Prediction | None = None
    budget_bytes: int | None = None
    why: str = ""
    overlap: bool = False
    gather_depth: int = 0
    precision: Precision = FULL_PRECISION
    shard_ranks: int | None = None
    update_in_backward: bool = False
    compression: Compression = UNCOMPRESSED
    executor: str = "built-in"
    algorithms: tuple[Algorithm, ...] = ()
    stretches: tuple[tuple[str, str], ...] = ()

    @property
    def group_ranks(self) -> int:
        """How many ranks share what is sharded."""
        return self.num_ranks if self.shard_ranks is None else self.shard_ranks

    @property
    def is_mixed(self) -> bool:
        """Whether its units differ in stage, or in what they keep until the backward."""
        return len({(unit.zero_stage, unit.is_kept) for unit in self.units}) > 1

    @property
    def recomputed_units(self) -> tuple[str, ...]:
        """Units whose forward runs again, alone or in a stretch, in order of execution."""
        again = {name for stretch in self.unit_stretches for name in stretch}
        return tuple(unit.name for unit in self.units if unit.recompute or unit.name in again)

    @property
    def unit_stretches(self) -> tuple[tuple[str, ...], ...]:
        """The names of all units of each stretch of two and more, outer ones first."""
        return units_of_stretches(self.stretches, [unit.name for unit in self.units])


def fingerprint(parameters: Iterable[tuple[str, str, str]]) -> str:
    """A short hash of a model's (parameter name, full shape, dtype) triples, in any order."""
    lines = sorted("\t".join(triple) for triple in parameters)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    value = {"format": FORMAT, **dataclasses.asdict(plan)}
    newer = {
        "precision": FULL_PRECISION,
        "update_in_backward": False,
        "compression": UNCOMPRESSED,
        "executor": "built-in",
        "algorithms": (),
        "stretches": (),
    }
    for field, default in newer.items():
        if getattr(plan, field) == default:
            del value[field]  # as in files that older versions read
    return value


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
            units=tuple(
                UnitPlan(
                    name=_typed(unit["name"], str),
                    zero_stage=_typed(unit["zero_stage"], int),
                    recompute=_typed(unit["recompute"], bool),
                    reshard=_typed(unit.get("reshard", True), bool),
                )
                for unit in value["units"]
            ),
            overlap=(overlap := _typed(value.get("overlap", False), bool)),
            # Older plans have neither, or `overlap` alone, which then spoke for both.
            gather_depth=_typed(value.get("gather_depth", int(overlap)), int),
            precision=_precision_from_json(value.get("precision", {})),
            shard_ranks=_typed(value.get("shard_ranks"), int, optional=True),
            update_in_backward=_typed(value.get("update_in_backward", False), bool),
            compression=_compression_from_json(value.get("compression", {})),
            executor=_typed(value.get("executor", "built-in"), str),
            algorithms=tuple(_algorithm_from_json(entry) for entry in value.get("algorithms", [])),
            stretches=tuple((_typed(a, str), _typed(b, str)) for a, b in value.get("stretches", ())),
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
    try:
        write_private_file(path, json.dumps(plan_to_json(plan), indent=1) + "\n", replace=replace)
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {error.strerror}.", hint="name a writable file."
        ) from error


def _prediction_from_json(value: Any) -> Prediction:
    return Prediction(
        peak_bytes=_typed(value["peak_bytes"], int),
        step_time_s=_seconds(value["step_time_s"]),
        by_category_bytes={str(name): _typed(size, int) for name, size in value["by_category_bytes"].items()},
        exposed_communication_s=_seconds(value["exposed_communication_s"]),
        peak_position=_typed(value["peak_position"], str),
        reserved_bytes=_typed(value.get("reserved_bytes"), int, optional=True),
        sent_bytes=_typed(value.get("sent_bytes"), int, optional=True),
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


def _algorithm_from_json(value: Any) -> Algorithm:
    return Algorithm(
        operation=_typed(value["operation"], str),
        min_bytes=_typed(value["min_bytes"], int),
        name=_typed(value["name"], str),
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


def check_plan(plan: Plan, source: str) -> None:
    """Raise PlanError, naming `source`, for a plan that nothing could be done with."""
    stages = {plan.zero_stage, *(unit.zero_stage for unit in plan.units)}
    if not stages <= {0, 1, 2, 3}:
        raise PlanError(f"{source} asks for ZeRO stage {max(stages)}.", hint="stages are 0 to 3.")
    if plan.num_ranks < 1:
        raise PlanError(f"{source} is for {plan.num_ranks} ranks.", hint="a plan is for 1 rank or more.")
    if plan.policy not in ("chosen", "none", "every-layer", "sqrt"):
        raise PlanError(
            f"{source} names the policy {plan.policy!r}.", hint="use chosen, none, every-layer or sqrt."
        )
    if plan.gather_depth < 0:
        raise PlanError(f"{source} has gather_depth {plan.gather_depth}.", hint="it must be 0 or more.")
    if plan.shard_ranks is not None and not (
        2 <= plan.shard_ranks <= plan.num_ranks and plan.num_ranks % plan.shard_ranks == 0
    ):
        raise PlanError(
            f"{source} has shard_ranks {plan.shard_ranks} for {plan.num_ranks} ranks.",
            hint="it must be 2 or more, and divide the number of ranks.",
        )
    names = [unit.name for unit in plan.units]
    if len(set(names)) < len(names):
        raise PlanError(f"{source} names a unit twice.", hint="name each unit once.")
    for field in ("micro_batch_size", "grad_accum", "budget_bytes"):
        value = getattr(plan, field)
        if value is not None and value < 1:
            raise PlanError(f"{source} has {field} {value}.", hint="it must be 1 or more.")
    check_precision(plan.precision, plan.num_ranks, stages, source)
    if plan.compression.has_feedback and plan.group_ranks < plan.num_ranks:
        raise PlanError(
            f"{source} compresses gradients that stay whole, and has shard_ranks {plan.shard_ranks}.",
            hint="leave one of them out.",
        )
    check_compression(plan.compression, plan.num_ranks, stages, source, plan.precision.reduce_dtype)
    asked = {
        f"ZeRO stage {min(stages)}": stages != {3},
        "one rank": plan.num_ranks == 1,
        **beside_fsdp2(plan),
    }
    check_executor(plan.executor, plan.algorithms, asked, source)
    if plan.update_in_backward and plan.executor != "built-in":
        raise PlanError(
            f"{source} updates in the backward by {plan.executor}.",
            hint="the built-in engine alone does that.",
        )
    gathered = {unit.name: unit.zero_stage == 3 and plan.num_ranks > 1 for unit in plan.units}
    check_stretches(plan.stretches, gathered, source)
    used = {unit.zero_stage for unit in plan.units} if plan.policy == "chosen" else stages
    if plan.update_in_backward and (plan.num_ranks == 1 or max(used, default=plan.zero_stage) < 2):
        where = "one rank" if plan.num_ranks == 1 else f"ZeRO stage {max(used, default=plan.zero_stage)}"
        raise PlanError(
            f"{source} updates in the backward with {where}, which keeps whole gradients until the optimizer step.",
            hint="it needs several ranks and stage 2 or 3.",
        )


def beside_fsdp2(plan: Plan) -> dict[str, bool]:
    """What FSDP2 is not told by a plan, in words, and whether this one asks for it."""
    return {
        "another precision": plan.precision.is_lossy,
        "compressed messages": plan.compression.is_lossy,
        "groups of ranks that share": plan.group_ranks != plan.num_ranks,
        "updates in the backward": plan.update_in_backward,
    }
