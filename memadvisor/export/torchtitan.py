"""A plan as arguments of torchtitan 0.3, in a fragment of shell: from that version on it reads no TOML.

Its trainer shards layers by FSDP2 and keeps its model in float32; activation checkpointing is of all layers or of none.
"""

from __future__ import annotations

from memadvisor.export.exported import (
    COARSER,
    FINER,
    LESS_MEMORY_MORE_TIME,
    MORE_MEMORY_LESS_TIME,
    OTHER_TIME,
    Difference,
    Exported,
    remarks,
)
from memadvisor.export.features import undone
from memadvisor.export.quoting import comments, shell_array
from memadvisor.export.reading import (
    autocast_note,
    gathered_by_fsdp,
    instead_of_autocast,
    one_stage,
    recomputation,
    resharding,
    stages,
)
from memadvisor.plan import Plan

_Groups = list[tuple[str, ...]]


def to_torchtitan(plan: Plan) -> Exported:
    stage, differences = one_stage(plan)
    said = {"models", "masters", "reduce_dtype", "narrow_sums", "autocast"} | (
        {"shard_ranks"} if stage == 0 else set()
    )
    groups: _Groups = []
    to_set = _batch(plan, groups)
    differences += _sharding(plan, stage, groups, said)
    differences += _offload(plan, groups, said)
    differences += _precision(plan, groups)
    mode, of_mode = _recomputation(plan, said)
    differences += of_mode
    groups.append((f"activation-checkpoint:{mode}",))  # a subcommand: what follows it would be its own
    differences += undone(plan, said)
    to_set += [
        *autocast_note(plan),
        "the model: --module NAME --config NAME before these (torchtitan trains the models that it knows)",
        f"the launch: torchrun with {plan.num_ranks} processes in all, and "
        '"${MEMADVISOR_ARGS[@]}" last after -m torchtitan.train',
    ]
    lines = remarks(plan, differences, to_set)
    return Exported(
        text=comments(lines) + shell_array("MEMADVISOR_ARGS", groups),
        has_comments=True,
        remarks=lines,
        differences=tuple(differences),
    )


def _batch(plan: Plan, groups: _Groups) -> list[str]:
    if plan.micro_batch_size is None:
        return [
            "--training.local_batch_size and --training.global_batch_size: the script's own, which the plan leaves alone"
        ]
    groups.append(("--training.local_batch_size", str(plan.micro_batch_size)))
    if plan.grad_accum is None:
        return ["--training.global_batch_size: the script's own accumulation, which the plan leaves alone"]
    size = plan.micro_batch_size * plan.grad_accum * plan.num_ranks
    groups.append(("--training.global_batch_size", str(size)))
    return []


def _sharding(plan: Plan, stage: int, groups: _Groups, said: set[str]) -> list[Difference]:
    sharded = plan.group_ranks if stage else 1
    said.add("shard_ranks")
    groups += [
        ("--parallelism.data_parallel_replicate_degree", str(plan.num_ranks // sharded)),
        ("--parallelism.data_parallel_shard_degree", str(sharded)),
        ("--parallelism.tensor_parallel_degree", "1"),
        ("--parallelism.pipeline_parallel_degree", "1"),
        ("--parallelism.context_parallel_degree", "1"),
    ]
    if not stage:
        said.add("gather_depth")
        return []
    if stage == 3:
        reshards, differences = resharding(plan)
    else:
        reshards, difference = gathered_by_fsdp(plan, f"ZeRO stage {stage}, parameters whole on every rank")
        differences = [difference]
    groups.append(("--parallelism.fsdp_reshard_after_forward", "always" if reshards else "never"))
    return differences


def _offload(plan: Plan, groups: _Groups, said: set[str]) -> list[Difference]:
    away = (plan.optimizer_tiers | plan.parameter_tiers) - {"device"}
    if not away:
        return []
    said |= {"optimizer_tier", "parameter_tier"}
    groups.append(("--training.enable_cpu_offload",))
    return [
        Difference(
            wanted=f"states of units on the {' and the '.join(sorted(away))}",
            instead="all parameters, gradients and optimizer state on the host, where the CPU updates them",
            errs=LESS_MEMORY_MORE_TIME,
        )
    ]


def _precision(plan: Plan, groups: _Groups) -> list[Difference]:
    precision = plan.precision
    half = precision.param_dtype not in (None, "float32") or plan.autocast is not None
    # Without shards it computes under autocast itself.
    differences = instead_of_autocast(plan, "weights are gathered in it, and all operators compute in it")
    differences = differences if max(stages(plan).values()) else []
    groups.append(
        ("--training.mixed_precision_param", "bfloat16" if half or precision.has_masters else "float32")
    )
    groups.append(("--training.mixed_precision_reduce", "float32"))
    if precision.param_dtype == "float16":
        differences.append(
            Difference(wanted="computation in float16", instead="torchtitan's is in bfloat16", errs=COARSER)
        )
    if precision.reduce_dtype not in (None, "float32"):
        differences.append(
            Difference(
                wanted=f"gradients summed over the ranks in {precision.reduce_dtype}",
                instead="torchtitan sums them in float32",
                errs=FINER,
            )
        )
    return differences


def _recomputation(plan: Plan, said: set[str]) -> tuple[str, list[Difference]]:
    again = recomputation(plan)
    if not again.is_any:
        return "none", []
    if again.keeps:
        said |= {"kept"}
        difference = Difference(
            wanted=f"{again.words}, with outputs of operators kept",
            instead="torchtitan's own selection in all layers: matrix products (every second), attention and communication"
            " are kept",
            errs=OTHER_TIME,
        )
        return "selective", [difference]
    if again.is_every_layer:
        return "full", []
    difference = Difference(wanted=again.words, instead="all layers run again", errs=LESS_MEMORY_MORE_TIME)
    num_others = len(set(again.units)) - again.num_layers
    if again.units and again.num_layers == 0 and num_others > 0:
        difference = Difference(
            wanted=again.words,
            instead="the layers that torchtitan knows run again",
            errs=MORE_MEMORY_LESS_TIME,
        )
    return "full", [difference]
