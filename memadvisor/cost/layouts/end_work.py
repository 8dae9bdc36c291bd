"""What the embedding and the head do for one microbatch on one rank, and how long that takes."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.kernels import Device, matmul_seconds, stream_seconds
from memadvisor.cost.layouts.layer_work import Groups, Work, accumulate_bytes, weight_cast_bytes
from memadvisor.cost.layouts.tensor_grids import grid_seconds, local_products
from memadvisor.layout import TrainingStep

# Of one logit: cast to float32, log-softmax, its gradient, and back: (2+4) + (4+4) + (4+4) + (4+2).
_LOGIT_FORWARD, _LOGIT_BACKWARD = 14.0, 14.0
# Without a cast, all in two bytes: (2+2) + (2 + 2+2+2).
_NARROW_LOGIT_FORWARD, _NARROW_LOGIT_BACKWARD = 4.0, 8.0
# By Megatron's own function, an operator for each part of it (mpu/cross_entropy.py): in its dtype of four bytes the greatest
# logit (4), taken off (4+4), exponentials (4+4), their sum (4), division by it (4+4), and the gradient (4+4); and the casts.
_SPLIT_LOGIT_FORWARD, _SPLIT_LOGIT_BACKWARD = 38.0, 14.0
# The same without casts, in two bytes.
_NARROW_SPLIT_FORWARD, _NARROW_SPLIT_BACKWARD = 16.0, 4.0
# In one kernel, which makes the gradient at once: read and written in two bytes, read again by the products.
_FUSED_LOGIT_FORWARD, _FUSED_LOGIT_BACKWARD = 6.0, 0.0
# The same over a copy in fp32: cast (2+4), read for the softmax (4), read and written as its gradient (4+4), which is cast back (4+2).
_WIDE_FUSED_FORWARD, _WIDE_FUSED_BACKWARD = 18.0, 6.0


def embedding_work(model: Architecture, step: TrainingStep, device: Device, groups: Groups) -> Work:
    """Looking rows up, and adding their gradients to the table's."""
    layout = step.layout
    tokens = step.microbatch_tokens + (step.decoded_tokens if model.encoder_layers else 0.0)
    activations = step.software.element_bytes * tokens * model.hidden
    calls = groups.tensor.seconds("all_reduce", activations) if layout.tensor > 1 else 0.0
    if groups.lines is not None:
        calls = groups.lines[0].seconds("all_gather", activations / layout.grid_side)
    trained = model.embedding_parameters() - model.frozen_tower_parameters()
    accumulate = stream_seconds(device, trained / layout.weight_ranks * accumulate_bytes(step))
    forward = stream_seconds(device, 2 * activations) + calls
    backward = stream_seconds(device, 2 * activations) + accumulate if _is_trained(step) else 0.0
    return Work(
        forward_s=forward, backward_s=backward, weight_s=backward, recompute_s=0.0, matmul_s=0.0, attention_s=0.0, recurrence_s=0.0,
        stream_s=forward - calls + backward, collective_s=calls, host_s=0.0,
    )  # fmt: skip


def _is_trained(step: TrainingStep) -> bool:
    """Whether the ends of the model have gradients."""
    return step.software.lora is None or step.software.lora.trains_ends


def _logit_bytes(step: TrainingStep) -> tuple[float, float]:
    """What the loss reads and writes of one logit, forward and backward, where an element of an activation has two bytes."""
    software = step.software
    if software.fused_loss and software.wide_fused_loss and not software.linear_loss:
        return _WIDE_FUSED_FORWARD, _WIDE_FUSED_BACKWARD
    if software.fused_loss or software.linear_loss:
        return _FUSED_LOGIT_FORWARD, _FUSED_LOGIT_BACKWARD
    if software.loss_bytes == 2 or software.element_bytes > 2:  # nothing is cast
        if software.split_loss:
            return _NARROW_SPLIT_FORWARD, _NARROW_SPLIT_BACKWARD
        return _NARROW_LOGIT_FORWARD, _NARROW_LOGIT_BACKWARD
    if software.split_loss:
        return _SPLIT_LOGIT_FORWARD, _SPLIT_LOGIT_BACKWARD
    return _LOGIT_FORWARD, _LOGIT_BACKWARD


def head_work(model: Architecture, step: TrainingStep, device: Device, groups: Groups) -> Work:
    """The last norm, the logits and their cross entropy; the vocabulary is split over the tensor-parallel ranks. It stays in
    16 bits where other products have fewer.
    """
    layout, device = step.layout, device.wide
    tp = layout.tensor
    tokens = step.decoded_tokens
    whole = (tokens, float(model.vocab), float(model.hidden), 1.0)
    matmul = matmul_seconds(device, tokens, model.vocab / tp, model.hidden)
    if model.head_layer:
        matmul += matmul_seconds(device, tokens, model.hidden / tp, model.hidden)
    logits = tokens * model.vocab / (tp if step.software.loss_parallel else 1)
    wide = step.software.element_bytes / 2
    per_forward, per_backward = _logit_bytes(step)
    forward_stream = stream_seconds(device, logits * per_forward * wide)
    backward_stream = stream_seconds(device, logits * per_backward * wide)
    parameters = model.head_parameters() / layout.weight_ranks
    accumulate = stream_seconds(device, parameters * (accumulate_bytes(step) + weight_cast_bytes(step)))
    forward_stream += stream_seconds(device, parameters * weight_cast_bytes(step))
    weight = matmul if _is_trained(step) else 0.0
    accumulate = accumulate if _is_trained(step) else 0.0
    activations = step.software.element_bytes * tokens * model.hidden
    calls = back_calls = groups.tensor.seconds("all_gather", activations) if tp > 1 else 0.0
    if groups.lines is not None:
        weight = matmul = matmul_seconds(device, *local_products(layout, [whole])[0])
        calls, back_calls = grid_seconds(layout, [whole], groups.lines)
    if tp > 1 and not step.software.loss_parallel:
        calls += groups.tensor.seconds("all_gather", 2.0 * wide * logits)
    return Work(
        forward_s=matmul + forward_stream + calls,
        backward_s=matmul + weight + backward_stream + accumulate + back_calls,
        weight_s=weight + accumulate,
        recompute_s=0.0,
        matmul_s=2 * matmul + weight,
        attention_s=0.0,
        recurrence_s=0.0,
        stream_s=forward_stream + backward_stream + accumulate,
        collective_s=calls + back_calls,
        host_s=0.0,
    )
