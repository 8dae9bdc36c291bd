"""A plan as DeepSpeed's JSON (deepspeed.initialize(config=...)); keys as of DeepSpeed 0.19.

DeepSpeed recomputes nothing by itself, and has one stage for all units. Its reduce and gather buckets are buffers of its
own, which no plan counts: beside a budget they are made to hold a sixteenth of it at most.
"""

from __future__ import annotations

import json
from typing import Any

from memadvisor.autocast import AUTOCAST_DTYPES
from memadvisor.export.exported import (
    LESS_MEMORY_MORE_TIME,
    MORE_HOST_MEMORY,
    MORE_MEMORY_LESS_TIME,
    OTHER_TIME,
    Difference,
    Exported,
    remarks,
)
from memadvisor.export.features import undone
from memadvisor.export.reading import autocast_note, one_stage, recomputation, resharding
from memadvisor.plan import Plan

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DEFAULT_BUCKET = 500_000_000  # elements
_ALL = 10**15  # elements: more than any model has


def to_deepspeed(plan: Plan) -> Exported:
    stage, differences = one_stage(plan)
    said = {"shard_ranks"} if stage == 0 else set()
    said |= {"overlap", "reduce_dtype", "narrow_sums", "masters", "models", "autocast"}
    config: dict[str, Any] = {}
    to_set = _batch(plan, config)
    zero, of_tiers = _offload(plan, stage, said)
    differences += of_tiers
    zero = {"stage": zero.pop("stage"), "overlap_comm": plan.overlap, **zero, **_buckets(plan)}
    if zero["stage"] == 3:
        differences += _stage_3(plan, zero, said)
    _precision(plan, config, to_set)
    config["zero_optimization"] = zero
    if zero["stage"] > 0:
        config["zero_allow_untested_optimizer"] = True
    places = [zero[key] for key in ("offload_optimizer", "offload_param") if key in zero]
    if plan.disk_directory is None and any(place["device"] == "nvme" for place in places):
        to_set.append("nvme_path: a directory on a fast disk; the plan names none, and /tmp stands there")
    if "offload_optimizer" in zero:
        config["zero_force_ds_cpu_optimizer"] = False
    differences += _recomputation(plan, config, said)
    differences += undone(plan, said)
    to_set += [
        *autocast_note(plan),
        "the script's optimizer and clipping: pass the one to deepspeed.initialize, say gradient_clipping for the other "
        "(a plan knows neither)",
    ]
    return Exported(
        text=json.dumps(config, indent=2) + "\n",
        has_comments=False,
        remarks=remarks(plan, differences, to_set),
        differences=tuple(differences),
    )


def _batch(plan: Plan, config: dict[str, Any]) -> list[str]:
    to_set = []
    if plan.micro_batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = plan.micro_batch_size
    else:
        to_set.append(
            "train_micro_batch_size_per_gpu: the script's own, which the plan leaves alone; DeepSpeed does not start without"
        )
    if plan.grad_accum is not None:
        config["gradient_accumulation_steps"] = plan.grad_accum
    else:
        to_set.append("gradient_accumulation_steps: the script's own, which the plan leaves alone")
    return to_set


def _offload(plan: Plan, stage: int, said: set[str]) -> tuple[dict[str, Any], list[Difference]]:
    """The stage, and where optimizer state and parameters go; DeepSpeed has stages below 3 swap to the host alone."""
    zero: dict[str, Any] = {"stage": stage}
    differences = []
    tiers = plan.optimizer_tiers - {"device"}
    if tiers:
        said.add("optimizer_tier")
        zero["stage"] = max(1, stage)
        on_disk = tiers == {"disk"} and zero["stage"] == 3
        zero["offload_optimizer"] = _place(plan, on_disk)
        wanted = f"optimizer state on the {' and the '.join(sorted(tiers))}, brought for its update"
        where = "NVMe" if on_disk else "the host"
        errs = MORE_HOST_MEMORY if "disk" in tiers and not on_disk else OTHER_TIME
        differences.append(
            Difference(wanted=wanted, instead=f"all of it on {where}, where the CPU updates it", errs=errs)
        )
    tiers = plan.parameter_tiers - {"device"}
    if tiers:
        said.add("parameter_tier")
        zero["offload_param"] = _place(plan, tiers == {"disk"})
        if any(unit.parameter_tier == "device" for unit in plan.units):
            differences.append(
                Difference(
                    wanted=f"parameters of some units on the {' and the '.join(sorted(tiers))}",
                    instead="those of all units",
                    errs=LESS_MEMORY_MORE_TIME,
                )
            )
    return zero, differences


def _place(plan: Plan, on_disk: bool) -> dict[str, str]:
    return {"device": "nvme", "nvme_path": plan.disk_directory or "/tmp"} if on_disk else {"device": "cpu"}


def _buckets(plan: Plan) -> dict[str, int]:
    """Two buffers for reductions and one for gathers, of four bytes an element at most."""
    if plan.budget_bytes is None:
        return {}
    elements = min(_DEFAULT_BUCKET, plan.budget_bytes // (16 * 3 * 4))
    elements = max(2, elements - elements % 2)  # stages 1 and 2 refuse odd ones
    return {"reduce_bucket_size": elements, "allgather_bucket_size": elements}


def _stage_3(plan: Plan, zero: dict[str, Any], said: set[str]) -> list[Difference]:
    reshards, differences = resharding(plan)
    zero["stage3_max_reuse_distance"] = 0 if reshards else _ALL
    zero["stage3_max_live_parameters"] = _ALL
    if plan.gather_depth == 0:
        zero["stage3_prefetch_bucket_size"] = 0
        said.add("gather_depth")
    if plan.secondary_ranks is not None:
        zero["zero_hpz_partition_size"] = plan.secondary_ranks
        said.add("secondary_ranks")
    if plan.compression.gather_bits == 8:
        zero["zero_quantized_weights"] = True
        said.add("gather_bits")
    if plan.compression.reduce_bits == 4:
        zero["zero_quantized_gradients"] = True
        said.add("reduce_bits")
    return differences


def _precision(plan: Plan, config: dict[str, Any], to_set: list[str]) -> None:
    precision = plan.precision
    half = precision.param_dtype if precision.param_dtype != "float32" else None
    if plan.autocast is not None:
        # No modules: else gradients of linear layers are summed in it.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": AUTOCAST_DTYPES[plan.autocast],
            "lower_precision_safe_modules": [],
        }
        to_set.append(
            ".float() on what the engine returns, where the script computes its loss: DeepSpeed leaves it in bfloat16"
        )
    if precision.has_masters and half is None:
        half = "bfloat16"
        to_set.append(
            "fp16 in the place of bf16, where the model is float16: the plan has masters, and does not say of what"
        )
    if half is not None:
        config[_DTYPES[half]] = {"enabled": True}
    if half == "float16":
        to_set.append("no GradScaler in the script: DeepSpeed scales losses by itself")
    if precision.is_lossy:
        config["communication_data_type"] = _DTYPES[precision.reduce_dtype or "float32"]


def _recomputation(plan: Plan, config: dict[str, Any], said: set[str]) -> list[Difference]:
    again = recomputation(plan)
    if not again.is_any:
        return []
    said |= {"kept", "stretches"}
    moved = {u.activation_tier for u in plan.units if u.name in again.units} - {"device"}
    config["activation_checkpointing"] = {"cpu_checkpointing": bool(moved)}
    return [
        Difference(
            wanted=again.words,
            instead="nothing by itself: DeepSpeed recomputes only what the model passes to deepspeed.checkpointing.checkpoint"
            " (or to torch's; a Hugging Face model's gradient_checkpointing_enable() does all layers)",
            errs=MORE_MEMORY_LESS_TIME,
        )
    ]
