"""A plan as arguments of Megatron-LM's training scripts, in a fragment of shell (megatron/training/arguments.py).

Stages 0 and 1 are Megatron's own data parallelism, without and with its distributed optimizer; 2 and 3 are Megatron-FSDP.
"""

from __future__ import annotations

from memadvisor.export.exported import (
    LESS_MEMORY_MORE_TIME,
    MORE_MEMORY,
    OTHER_TIME,
    Difference,
    Exported,
    remarks,
)
from memadvisor.export.features import undone
from memadvisor.export.quoting import comments, shell_array
from memadvisor.export.reading import autocast_note, instead_of_autocast, one_stage, recomputation, resharding
from memadvisor.plan import Plan

_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
_Groups = list[tuple[str, ...]]


def to_megatron(plan: Plan) -> Exported:
    stage, differences = one_stage(plan)
    said = {"models", "gather_depth", "overlap"} | ({"shard_ranks"} if stage == 0 else set())
    groups: _Groups = [
        ("--tensor-model-parallel-size", "1"),
        ("--pipeline-model-parallel-size", "1"),
        ("--context-parallel-size", "1"),
    ]
    to_set = _batch(plan, groups)
    differences += _sharding(plan, stage, groups, said)
    differences += _precision(plan, groups, said)
    differences += _recomputation(plan, groups, said)
    differences += undone(plan, said)
    to_set += [
        *autocast_note(plan),
        "the model's own arguments (--num-layers, --hidden-size, --num-attention-heads, --seq-length ...): a plan is of units,"
        " and Megatron builds the model itself",
        f"the launch: torchrun with {plan.num_ranks} processes in all, and "
        '"${MEMADVISOR_ARGS[@]}" after pretrain_gpt.py',
    ]
    lines = remarks(plan, differences, to_set)
    unset = "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1\n" if stage >= 2 else ""
    return Exported(
        text=comments(lines) + unset + shell_array("MEMADVISOR_ARGS", groups),
        has_comments=True,
        remarks=lines,
        differences=tuple(differences),
    )


def _batch(plan: Plan, groups: _Groups) -> list[str]:
    if plan.micro_batch_size is None:
        return ["--micro-batch-size and --global-batch-size: the script's own, which the plan leaves alone"]
    groups.append(("--micro-batch-size", str(plan.micro_batch_size)))
    if plan.grad_accum is None:
        return ["--global-batch-size: the script's own accumulation, which the plan leaves alone"]
    groups.append(("--global-batch-size", str(plan.micro_batch_size * plan.grad_accum * plan.num_ranks)))
    return []


def _sharding(plan: Plan, stage: int, groups: _Groups, said: set[str]) -> list[Difference]:
    differences: list[Difference] = []
    offloads = plan.optimizer_tiers != {"device"}
    if stage >= 1 or offloads:
        groups.append(("--use-distributed-optimizer",))
    if stage >= 2:
        groups += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", _STRATEGIES[stage]),
            ("--no-gradient-accumulation-fusion",),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    if stage == 3:
        reshards, differences = resharding(plan)
        if not reshards:
            differences.append(
                Difference(
                    wanted="parameters kept from the forward to the backward",
                    instead="Megatron-FSDP frees them after the forward",
                    errs=LESS_MEMORY_MORE_TIME,
                )
            )
    if plan.overlap and plan.num_ranks > 1:
        groups.append(("--overlap-grad-reduce",))
        if stage >= 1:
            groups.append(("--overlap-param-gather",))
    if plan.group_ranks < plan.num_ranks and stage >= 1:
        said.add("shard_ranks")
        groups.append(("--num-distributed-optimizer-instances", str(plan.num_ranks // plan.group_ranks)))
    if offloads:
        said.add("optimizer_tier")
        groups += [("--optimizer-cpu-offload",), ("--use-precision-aware-optimizer",)]
        differences.append(
            Difference(
                wanted="optimizer state elsewhere between updates",
                instead="all of it on the host, where the CPU updates it",
                errs=OTHER_TIME,
            )
        )
    return differences


def _precision(plan: Plan, groups: _Groups, said: set[str]) -> list[Difference]:
    """Megatron's parameters are in the dtype it computes with, beside float32 masters."""
    precision = plan.precision
    half = precision.param_dtype if precision.param_dtype != "float32" else None
    said |= {"masters", "autocast"}
    if half is None and (precision.has_masters or plan.autocast is not None):
        half = "bfloat16"
    if half is not None:
        groups.append(("--bf16",) if half == "bfloat16" else ("--fp16",))
        reduce_dtype = precision.reduce_dtype or "float32"
        if half == "bfloat16" and precision.is_lossy and reduce_dtype != "float32":
            groups.append(("--grad-reduce-in-bf16",))
            said.add("reduce_dtype")
        elif reduce_dtype == "float32":
            groups.append(("--accumulate-allreduce-grads-in-fp32",))
            said.add("reduce_dtype")
    return instead_of_autocast(plan, "Megatron keeps the model itself in bfloat16, beside float32 masters")


def _recomputation(plan: Plan, groups: _Groups, said: set[str]) -> list[Difference]:
    again = recomputation(plan)
    if not again.is_any:
        return []
    said |= {"kept", "stretches"}
    length = _even_stretches(plan)
    groups.append(("--recompute-granularity", "full"))
    if again.is_every_layer or length or not again.num_layers:
        groups += [("--recompute-method", "uniform"), ("--recompute-num-layers", str(length or 1))]
        exact = again.is_every_layer and not again.keeps and (length > 0 or not plan.stretches)
        instead = "every layer runs again"
    else:
        layered = sum(name.rpartition(".")[2].isdecimal() for name in again.units)
        groups += [("--recompute-method", "block"), ("--recompute-num-layers", str(layered))]
        exact, instead = False, f"the first {layered} layers run again"
    if exact:
        return []
    errs = LESS_MEMORY_MORE_TIME if instead.startswith("every") else OTHER_TIME
    if plan.stretches and not length:
        errs = MORE_MEMORY
    words = again.words + (", with outputs of operators kept" if again.keeps else "")
    return [Difference(wanted=words, instead=f"{instead}, as a whole", errs=errs)]


def _even_stretches(plan: Plan) -> int:
    """The units of each stretch, where stretches of one length hold all layers: what `uniform` means. 0: they do not."""
    again, stretches = recomputation(plan), plan.unit_stretches
    lengths = {len(stretch) for stretch in stretches}
    covered = [name for stretch in stretches for name in stretch]
    even = len(lengths) == 1 and again.is_every_layer and len(covered) == again.num_layers
    return lengths.pop() if even else 0
