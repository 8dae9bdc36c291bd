"""Gradients of FSDP's root unit, which has what is in no layer: the embedding, the last norm and the head.

A unit's gradients are whole, in the dtype that it computes in, until its backward is over, and are copied for their reduction then
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward, and _fsdp_collectives.py, foreach_reduce). That of a layer
is over when the next one's begins. The root's ends with the backward: the head's gradient is there throughout, and the embedding's
comes last.
"""

from __future__ import annotations

from memadvisor.layout import TrainingStep


def root_gradient_bytes(step: TrainingStep, head_parameters: float) -> float:
    """Of the head, from the end of its own backward on; `head_parameters` before tensor parallelism."""
    if not _has_whole_gradients(step):
        return 0.0
    return step.software.element_bytes * head_parameters / step.layout.weight_ranks


def root_reduction_bytes(step: TrainingStep, end_parameters: float) -> float:
    """Of the embedding and the head, where the backward ends: gradients, and their copy to reduce; `end_parameters` of a rank."""
    if not _has_whole_gradients(step):
        return 0.0
    return (step.software.element_bytes + step.software.reduce_bytes) * end_parameters


def _has_whole_gradients(step: TrainingStep) -> bool:
    """Whether the ends' gradients are whole for a time that others' are not."""
    layout, software = step.layout, step.software
    is_trained = software.lora is None or software.lora.trains_ends
    is_sharded = layout.zero_stage == 3 and layout.shard_ranks > 1
    return (
        software.keeps_ends
        and is_trained
        and is_sharded
        and not (step.keeps_gathered or step.defers_reduction)
    )
