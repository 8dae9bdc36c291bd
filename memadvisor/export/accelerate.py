"""A plan as the YAML of `accelerate launch --config_file`: FSDP2, DeepSpeed or plain data parallelism, as keeps most of it.

Stage 3 is FSDP2, but where optimizer state leaves the device by itself; stages 1 and 2 are DeepSpeed's, stage 0 DDP.
"""

from __future__ import annotations

from typing import Any

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
from memadvisor.export.quoting import comments, yaml_mapping
from memadvisor.export.reading import autocast_note, instead_of_autocast, one_stage, recomputation, resharding
from memadvisor.plan import Plan


def to_accelerate(plan: Plan) -> Exported:
    stage, differences = one_stage(plan)
    tiers = (plan.optimizer_tiers | plan.parameter_tiers) - {"device"}
    said = {"models"} | ({"shard_ranks"} if stage == 0 else set())
    own: dict[str, Any] = {}
    if not tiers and stage == 0:
        kind = "MULTI_GPU" if plan.num_ranks > 1 else "NO"
        more = _unrecomputed(plan, said)
    elif not tiers and stage == 3:
        kind = "FSDP"
        own, more = _fsdp(plan, said)
    else:
        kind = "DEEPSPEED"
        own, more = _deepspeed(plan, stage, said)
    differences += more
    mixed = plan.autocast or _precision(plan, said)
    said.add("autocast")
    if kind == "DEEPSPEED":
        differences += instead_of_autocast(
            plan, "accelerate has DeepSpeed keep the model itself in bfloat16, beside float32 masters"
        )
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": plan.num_ranks,
        "mixed_precision": mixed,
        "use_cpu": False,
        **own,
    }
    differences += undone(plan, said)
    lines = remarks(plan, differences, _to_set(plan, kind, own))
    return Exported(
        text=comments(lines) + yaml_mapping(config),
        has_comments=True,
        remarks=lines,
        differences=tuple(differences),
    )


def _to_set(plan: Plan, kind: str, own: dict[str, Any]) -> list[str]:
    batch = "the script's own, which the plan leaves alone"
    if plan.micro_batch_size is not None:
        batch = f"{plan.micro_batch_size}, the batch size of the script's DataLoader"
    accumulation = "the script's own, which the plan leaves alone"
    if plan.grad_accum is not None:
        accumulation = f"Accelerator(gradient_accumulation_steps={plan.grad_accum}) in the script"
    to_set = [
        *autocast_note(plan),
        f"micro-batch: {batch}",
        f"accumulation: {accumulation}",
        "num_machines, machine_rank and main_process_ip, where the ranks are on several machines",
    ]
    if plan.disk_directory is None and any("nvme_path" in key for key in own.get("deepspeed_config", ())):
        to_set.append("the nvme_path: a directory on a fast disk; the plan names none, and /tmp stands there")
    if kind == "FSDP":
        to_set.append(
            "fsdp_transformer_layer_cls_to_wrap, the class of the layers, unless the model has _no_split_modules as Hugging "
            "Face's do: without either the whole model is gathered at once, which takes more memory"
        )
    return to_set


def _fsdp(plan: Plan, said: set[str]) -> tuple[dict[str, Any], list[Difference]]:
    reshards, differences = resharding(plan)
    again = recomputation(plan)
    config: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshards,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": again.is_any,
    }
    if again.is_any:
        if not again.is_every_layer:
            differences.append(
                Difference(
                    wanted=again.words, instead="all wrapped layers run again", errs=LESS_MEMORY_MORE_TIME
                )
            )
        tiers = {unit.activation_tier for unit in plan.units if unit.name in again.units}
        elsewhere = any(u.activation_tier != "device" for u in plan.units if u.name not in again.units)
        if "device" not in tiers and plan.units and not elsewhere:
            config["fsdp_activation_checkpointing_offload"] = True
            said.add("activation_tier")
            if "disk" in tiers:
                differences.append(
                    Difference(
                        wanted="activations on the disk",
                        instead="they are on the host",
                        errs=MORE_HOST_MEMORY,
                    )
                )
    own: dict[str, Any] = {"fsdp_config": config}
    if plan.group_ranks < plan.num_ranks:
        said.add("shard_ranks")
        own["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": plan.num_ranks // plan.group_ranks,
            "parallelism_config_dp_shard_size": plan.group_ranks,
        }
    return own, differences


def _deepspeed(plan: Plan, stage: int, said: set[str]) -> tuple[dict[str, Any], list[Difference]]:
    differences = _unrecomputed(plan, said)
    said |= {"optimizer_tier", "parameter_tier"}
    config: dict[str, Any] = {"zero_stage": max(1, stage), "zero3_init_flag": False}
    if plan.grad_accum is not None:
        config["gradient_accumulation_steps"] = plan.grad_accum
    for what, tiers in (("optimizer", plan.optimizer_tiers), ("param", plan.parameter_tiers)):
        away = tiers - {"device"}
        if not away:
            config[f"offload_{what}_device"] = "none"
            continue
        on_disk = away == {"disk"} and stage == 3
        config[f"offload_{what}_device"] = "nvme" if on_disk else "cpu"
        if on_disk:
            config[f"offload_{what}_nvme_path"] = plan.disk_directory or "/tmp"
        noun = "optimizer state" if what == "optimizer" else "parameters"
        differences.append(
            Difference(
                wanted=f"{noun} on the {' and the '.join(sorted(away))} between uses",
                instead=f"that of all units on {'NVMe' if on_disk else 'the host'}, where the CPU updates it",
                errs=MORE_HOST_MEMORY if "disk" in away and not on_disk else OTHER_TIME,
            )
        )
    if stage == 3:
        reshards, more = resharding(plan)
        differences += more
        if not reshards:
            differences.append(
                Difference(
                    wanted="parameters kept from the forward to the backward",
                    instead="DeepSpeed frees those that are not used again soon",
                    errs=OTHER_TIME,
                )
            )
    return {"deepspeed_config": config}, differences


def _unrecomputed(plan: Plan, said: set[str]) -> list[Difference]:
    again = recomputation(plan)
    if not again.is_any:
        return []
    said |= {"kept", "stretches"}
    return [
        Difference(
            wanted=again.words,
            instead="nothing by itself: the model must checkpoint these (a Hugging Face model's "
            "gradient_checkpointing_enable() does all layers)",
            errs=MORE_MEMORY_LESS_TIME,
        )
    ]


def _precision(plan: Plan, said: set[str]) -> str:
    precision = plan.precision
    half = precision.param_dtype if precision.param_dtype != "float32" else None
    if half is None and precision.has_masters:
        half = "bfloat16"
    if half is not None:
        said.add("masters")  # accelerate keeps float32 of what it computes with in 16 bits
        return {"bfloat16": "bf16", "float16": "fp16"}[half]
    return "no"
