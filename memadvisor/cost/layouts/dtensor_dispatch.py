"""What the host takes of a layer whose matrices tensor parallelism has as DTensors, beyond what launching its kernels takes.

torch's own tensor parallelism (parallelize_module; torchtitan, FSDP2) sends every operator on a DTensor through Python, where its
sharding is looked up, and every change of layout too (torch/distributed/tensor/_dispatch.py, _redistribute.py). A compiled
layer has that behind it when it was traced. Measured of a Llama's layer on one core of an EPYC server, without a device, torch
2.13: of seven matrices 4.0 ms forward and 5.8 backward, of which the same layer without DTensors takes 0.4 and 0.5; with
sequence parallelism, whose norms and inputs are DTensors as well, 1.2 and 2.5 ms more (docs/cost-model.md).
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.adapters import layer_matrices
from memadvisor.layout import TrainingStep

# Forward and backward.
_MATRIX_S = (0.57e-3, 0.82e-3)
_NORM_S = (0.6e-3, 1.2e-3)
_HEAD_NORMS = 2  # of queries and of keys


def dtensor_seconds(model: Architecture, step: TrainingStep, layer: int) -> tuple[float, float]:
    """Of one microbatch through a layer, forward and backward; grouped products of experts are of plain tensors."""
    layout = step.layout
    if layout.tensor == 1 or layout.tensor_kind != "1d" or not step.software.dtensors:
        return 0.0, 0.0
    matrices = sum(not matrix.num_experts for matrix in layer_matrices(model, layer))
    norms = 0
    if layout.sequence_parallel:
        norms = model.num_norms(layer)
        norms += _HEAD_NORMS if model.qk_norm and model.has_attention(layer) else 0
    forward_s, backward_s = (
        matrices * matrix + norms * norm for matrix, norm in zip(_MATRIX_S, _NORM_S, strict=True)
    )
    return forward_s, backward_s
