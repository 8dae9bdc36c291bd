"""How long a layer's attention takes on one rank, its projections left out: scores, softmax and their product with the values."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.kernels import (
    Device,
    fused_attention_seconds,
    matmul_seconds,
    stream_seconds,
    unaligned_matmul_seconds,
)
from memadvisor.cost.layouts.key_index import index_seconds
from memadvisor.layout import TrainingStep

# Bytes that pass of one score of two bytes where attention is not fused: softmax and dropout, forward and backward (each
# reads and writes two-byte scores, dropout a mask of one byte).
_SCORES_FORWARD, _SCORES_FORWARD_DROPOUT = 4.0, 9.0
_SCORES_BACKWARD, _SCORES_BACKWARD_DROPOUT = 6.0, 11.0
# Under torch.autocast, whose softmax is in fp32: cast from two bytes to four (2+4), softmax (4+4), dropout (4+4 and a
# mask of one), and cast back for the product (4+2); backward the same way round, where softmax reads its result too.
_CAST_FORWARD, _CAST_FORWARD_DROPOUT = 20.0, 29.0
_CAST_BACKWARD, _CAST_BACKWARD_DROPOUT = 24.0, 33.0
# Of Hugging Face's classes besides: scaled (2+2), and the mask is added (2+2).
_APART_FORWARD, _APART_BACKWARD = 8.0, 4.0
# Of fused attention's rate where keys and values pass round a ring, in blocks whose results are merged: measured, 86 % on
# 8 H800 and 84 % on 8 A100 (https://github.com/feifeibear/long-context-attention, README.md, zigzag).
_RING_SHARE = 0.86
# FlashAttention 2, before Hopper: what a token of a query takes beside the keys that it sees, as so many keys more, forward
# and backward. Measured by its own benchmark of 512 to 16,384 tokens on RTX A5000 and H100
# (https://github.com/gpu-mode/ring-attention/issues/10, https://github.com/Dao-AILab/flash-attention/pull/2688): the
# backward's rate is half as high again at 8,192 tokens as at 512.
_BEGINNING_FORWARD, _BEGINNING_BACKWARD = 100.0, 280.0
# Its rates beside that, over those that coefficients have, which hold at 2,048 to 4,096 tokens.
_LONG_FORWARD, _LONG_BACKWARD = 1.07, 1.12
# Queries that a kernel takes together, and so sees the window of the first and of the last of (flash_fwd_launch_template.h: 128).
_TILE = 128
# Two-byte elements of 16 bytes, which a head is a multiple of for tensor cores to take it.
_ALIGNED = 8


def attention_columns(model: Architecture) -> tuple[float, float]:
    """Columns of queries (and keys, per query head) and of values over all heads."""
    if model.latent is not None:
        latent = model.latent
        query = latent.nope_head_dim + latent.rope_head_dim
        return model.n_heads * query, model.n_heads * latent.value_head_dim
    return model.n_heads * model.head_dim, model.n_heads * model.head_dim


def attention_seconds(
    model: Architecture, step: TrainingStep, layer: int, device: Device
) -> tuple[float, float]:
    """Seconds of a layer's attention, and of its cross attention where it has one: forward and backward; none of other layers."""
    if not model.has_attention(layer):
        return 0.0, 0.0
    crosses = model.has_cross_attention(layer)
    length = step.length_of(is_decoder=crosses)
    sees_half = model.causal and layer >= model.encoder_layers  # an encoder's tokens see all others
    window = model.window_of(layer)
    forward_s, backward_s = _attention_core(model, step, device, length, length, sees_half, window)
    forward_s += index_seconds(model, step, device)
    if crosses:
        across = _attention_core(model, step, device, length, step.seq_len, sees_half=False)
        forward_s, backward_s = forward_s + across[0], backward_s + across[1]
    return forward_s, backward_s


def seen_keys(step: TrainingStep, seen: int, sees_half: bool, window: int) -> float:
    """Keys that a fused kernel goes over for a query, on average: of `seen` tokens those of its sample and before it, or of
    its layer's window, the tiles that a part of it is in among them."""
    software = step.software
    # Kernels skip what is of other samples (flash_attn_varlen_func); scores in memory are masked, each as dear as before.
    length = software.seen_len(seen)
    whole = length * (0.5 if sees_half else 1.0)
    if not window or window >= length or software.masks_windows:
        return whole
    before = window * (1.0 - window / (2.0 * length))  # the first tokens have fewer before them
    return min(whole, (before + _TILE) * (1.0 if sees_half else 2.0))


def _attention_core(
    model: Architecture,
    step: TrainingStep,
    device: Device,
    length: int,
    seen: int,
    sees_half: bool,
    window: int = 0,
) -> tuple[float, float]:
    """Seconds of scores, softmax and their product with the values: forward and backward. `length` tokens of a sequence
    look at `seen`, or those of a window before them."""
    layout, software = step.layout, step.software
    query, value = attention_columns(model)
    batch, tp = layout.micro_batch_size, layout.tensor
    rows = length / layout.context
    if software.fused_attention:
        keys = seen_keys(step, seen, sees_half, window)
        each = fused_attention_seconds(
            device,
            2.0 * batch * rows * (query + value) / tp,
            software.attention_speed,
            is_as_on_hopper=software.attention_as_on_hopper,
        )
        if layout.context > 1 and layout.context_kind == "ring":
            each /= _RING_SHARE
        share = software.attention_backward_share or device.coefficients.attention_backward_share
        if device.is_fast or not software.flash2:
            return each * keys, 2.5 * each * keys / share
        each /= _LONG_FORWARD
        backward = 2.5 * each * (keys + _BEGINNING_BACKWARD) / (share * _LONG_BACKWARD)
        return each * (keys + _BEGINNING_FORWARD), backward
    heads = model.n_heads / tp * batch
    head = query / model.n_heads
    product = matmul_seconds if head % _ALIGNED == 0 else unaligned_matmul_seconds
    products = product(device.wide, rows, seen, head, heads) + product(device.wide, rows, head, seen, heads)
    scores = heads * rows * seen * device.element_bytes / 2
    dropout = model.reference_code.score_dropout if software.reference_code else software.dropout
    forward_bytes = _SCORES_FORWARD_DROPOUT if dropout else _SCORES_FORWARD
    backward_bytes = _SCORES_BACKWARD_DROPOUT if dropout else _SCORES_BACKWARD
    if software.autocast:
        forward_bytes = _CAST_FORWARD_DROPOUT if dropout else _CAST_FORWARD
        backward_bytes = _CAST_BACKWARD_DROPOUT if dropout else _CAST_BACKWARD
    if software.reference_code:
        forward_bytes, backward_bytes = forward_bytes + _APART_FORWARD, backward_bytes + _APART_BACKWARD
    return (
        products + stream_seconds(device, scores * forward_bytes),
        2 * products + stream_seconds(device, scores * backward_bytes),
    )
