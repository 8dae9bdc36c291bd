"""What the host takes of a layer whose modules have their parameters gathered one by one, by hooks of Python around each.

DeepSpeed's ZeRO stage 3 hangs them on every module that has parameters of its own: before its forward and its backward they are
fetched, and what comes next is asked for, behind it they are let go (deepspeed/runtime/zero/parameter_offload.py,
pre_sub_module_forward_function; partitioned_param_coordinator.py, fetch_sub_module). Experts are modules each.
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.adapters import layer_matrices
from memadvisor.layout import TrainingStep

_NORMS = 2


def hooked_modules(model: Architecture, step: TrainingStep, layer: int) -> float:
    """Modules of a layer with parameters of their own, on one rank: its matrices, its norms, and two of each adapter."""
    layout, lora = step.layout, step.software.lora
    count = float(min(_NORMS, model.num_norms(layer)))
    for matrix in layer_matrices(model, layer):
        with_adapter = lora is not None and matrix.target in lora.targets
        count += max(1.0, matrix.num_experts / layout.expert) * (3 if with_adapter else 1)
    return count


def hooks_seconds(model: Architecture, step: TrainingStep, layer: int) -> float:
    """Of one pass through a layer, forward or backward; none where parameters are not sharded."""
    software = step.software
    if step.layout.zero_stage < 3 or not software.module_hook_s:
        return 0.0
    return software.module_hook_s * hooked_modules(model, step, layer)
