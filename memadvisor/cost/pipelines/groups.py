"""How many microbatches pass a part of the model one after the other."""

from __future__ import annotations

from memadvisor.cost.pipelines.schedules import canonical_name

# Schedules that run each microbatch through the parts of the model on a device one after the other (1F1B is so with several).
_LOOPED = ("1f1b", "interleaved", "breadth-first")


def passes_beside(schedule: str, chunks: int, num_stages: int, num_microbatches: int) -> int:
    """How many microbatches run where a step's reductions, or gathers, may go on beside them.

    Under looped schedules a device's part of the model is through with its last group of microbatches, as many as there
    are stages (all of them, breadth-first), before the part in front of it begins with them; then its gradients are
    reduced (megatron/core/pipeline_parallel/schedules.py, is_last_microbatch_for_model_chunk and grad_sync_func;
    arXiv:2211.05953, section 4.2).
    """
    name = canonical_name(schedule)
    if chunks == 1 or name not in _LOOPED:
        return 1
    return num_microbatches if name == "breadth-first" else min(num_stages, num_microbatches)
