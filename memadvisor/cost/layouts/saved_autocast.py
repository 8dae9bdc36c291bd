"""What torch.autocast adds to the bytes that a step holds: parameters, the residual stream, softmax and the loss are in fp32,
and of both operands of a product there is a copy in two bytes.

Matrices are copied once: autocast's cache has the copies until its context ends, and autograd until the backward. Inputs are
copied once for each product that reads them. Which operators run in fp32 on an accelerator:
https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32" (softmax, pow, cross_entropy,
layer_norm among them). tests/cost/layouts/test_saved_autocast.py compares every term with captures.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from memadvisor.architecture import Architecture
from memadvisor.software_traits import Software


def fp32_norm_bytes(model: Architecture) -> float:
    """What a norm of Hugging Face's class keeps of an element of its fp32 input, its result left out: LayerNorm the input, an
    RMSNorm what it is scaled to as well. Copies to fp32, which it makes of two bytes, it need not make.
    """
    return 4.0 * ceil((model.reference_code.norm_bytes - 2.0) / 4.0)


def num_readers(model: Architecture, layer: int) -> int:
    """Products that read a norm's result, each of which makes a copy of it."""
    readers = model.has_cross_attention(layer) + model.has_recurrence(layer)
    if model.has_attention(layer):
        readers += 1 if model.reference_code.fused_qkv else 3
    if model.has_feed_forward(layer):
        readers += 2 if model.gated_mlp else 1
    return readers


def stream_bytes(model: Architecture, layer: int) -> float:
    """Of an element of a layer's residual stream: what its norms keep, the copy that each product makes of their results, and
    behind its parts the masks of dropouts and results that a vector scales.
    """
    masks = 1.0 if model.reference_code.residual_dropout else 0.0
    behind = model.num_sublayers(layer) * (masks + 2.0 * model.scales_parts)
    return model.num_norms(layer) * fp32_norm_bytes(model) + 2.0 * num_readers(model, layer) + behind


def encoder_copies_bytes(software: Software) -> float:
    """Of an element of the encoder's result, the copies that one layer's cross attention makes: for keys and for values."""
    return 4.0 if software.reference_code else 2.0


def fp32_column_bytes(model: Architecture) -> float:
    """Of an inner column, what is kept in fp32 of an activation function that is written with torch.pow: three of the four
    tensors of gelu_new, and its result where a gate multiplies it.
    """
    if model.reference_code.activation_tensors != 4:
        return 0.0
    return 6.0 + (2.0 if model.gated_mlp else 0.0)


def only_matrices(model: Architecture) -> Architecture:
    """The model without what autocast keeps no copy of until the backward: biases and norms."""
    return replace(
        model, biases=False, qkv_biases=False, output_bias=False, mlp_biases=False, qk_norm=0, norm_vectors=0
    )
