"""FLOPs of attention that runs as one operator, and of the fused encoder layers that contain it.

The forward is two products (Q K', P V), the backward needs four (dP, dV, dQ, dK), and a fused one runs Q K' once
more because it kept no scores (arXiv:2205.14135, section 3.2): executed, not needed. Causal attention needs the
pairs on and below the diagonal, T(T+1)/2 of T*T, and its kernels skip the others by blocks, so that executed is
counted alike. What a mask that is given as a tensor hides is not known from shapes: all its pairs count. So
they do where the script multiplies Q K' itself, or torch does by its plain way (dropout on CPU, for instance).
Grouped queries: every query head meets the keys that its group shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from memadvisor.capture.arguments import Arguments, Arithmetic, shapes_text
from memadvisor.cuda_graphs import is_capturing


def _num_pairs(num_queries: int, num_keys: int, causal: str, window: int | None) -> int:
    """Query-key pairs of one head. Causal from "top": query i sees keys 0..i; from "bottom": the last query sees
    the last key. `window` is how many keys before its own a causal query sees."""
    if not causal:
        return num_queries * num_keys
    shift = num_keys - num_queries if causal == "bottom" else 0
    if shift == 0 and window is None:
        shorter = min(num_queries, num_keys)
        return shorter * (shorter + 1) // 2 + (num_queries - shorter) * num_keys
    total = 0
    for query in range(num_queries):
        last = min(query + shift, num_keys - 1)
        first = 0 if window is None else max(0, query + shift - window)
        total += max(0, last - first + 1)
    return total


def _attend(pairs: int, width: int, value_width: int, shapes: str) -> Arithmetic:
    flops = 2 * pairs * (width + value_width)
    return Arithmetic(flops, flops, shapes)


def _attend_backward(
    pairs: int, width: int, value_width: int, shapes: str, mask: tuple[bool, ...]
) -> Arithmetic:
    """dP always runs; `mask` says which of dQ, dK, dV are asked for."""
    by_width, by_value = 2 * pairs * width, 2 * pairs * value_width
    needs_scores = mask[0] or mask[1]
    needed = by_value * (needs_scores + mask[2]) + by_width * (mask[0] + mask[1])
    return Arithmetic(3 * by_width + 2 * by_value, needed, shapes)


class _Layout:
    """Query, key and value of a call as (batch, heads, length, width), or packed as (all tokens, heads, width)."""

    def __init__(self, call: Arguments, names: tuple[str, str, str], *, heads_first: bool) -> None:
        self._call = call
        self._tensors = [call[name] for name in names]
        self._heads_first = heads_first
        self.width = int(self._tensors[0].shape[-1])
        self.value_width = int(self._tensors[2].shape[-1])

    @property
    def shapes(self) -> str:
        return shapes_text(*(self._as_heads_first(tensor.shape) for tensor in self._tensors))

    def _as_heads_first(self, shape: Any) -> tuple[Any, ...]:
        if len(shape) == 3:  # packed
            return (1, shape[1], shape[0], shape[2])
        return tuple(shape) if self._heads_first else (shape[0], shape[2], shape[1], shape[3])

    def pairs(self, causal: str, window: int | None) -> int:
        batch, heads, num_queries, _ = self._as_heads_first(self._tensors[0].shape)
        num_keys = self._as_heads_first(self._tensors[1].shape)[2]
        lengths = list(self._packed_lengths())
        if lengths:
            return int(heads) * sum(_num_pairs(q, k, causal, window) for q, k in lengths)
        return int(batch) * int(heads) * _num_pairs(int(num_queries), int(num_keys), causal, window)

    def _packed_lengths(self) -> Iterator[tuple[int, int]]:
        """(queries, keys) of each sequence of a packed batch. Their ends stand in tensors, which are read: on a
        GPU that waits for it, once a call of a traced step; where it may not wait, the longest length counts."""
        for query_name, key_name in (
            ("cum_seq_q", "cum_seq_k"),
            ("cu_seqlens_q", "cu_seqlens_k"),
        ):
            if query_name not in self._call or self._call[query_name] is None:
                continue
            ends = self._call[query_name], self._call[key_name]
            if any(end.numel() < 2 for end in ends):  # the backward of a dense batch is given empty ones
                continue
            yield from zip(*(_lengths(end) for end in ends), strict=True)


def _lengths(ends: torch.Tensor) -> list[int]:
    if ends.is_cuda and is_capturing():
        raise RuntimeError("the lengths of a packed batch cannot be read while a CUDA graph is captured")
    numbers = ends.tolist()
    return [after - before for before, after in pairwise(numbers)]


def _causal(call: Arguments, *, bottom: bool) -> str:
    if "custom_mask_type" in call:
        return ("", "top", "bottom")[call["custom_mask_type"]]
    name = "is_causal" if "is_causal" in call else "causal"
    return ("bottom" if bottom else "top") if call[name] else ""


def _window(call: Arguments) -> int | None:
    """How far back a causal query sees; None without a limit."""
    for name in ("window_size_left", "window_size"):
        if name in call and isinstance(call[name], int) and call[name] >= 0:
            size = int(call[name])
            # memory-efficient attention counts the query itself in its window, flash attention does not
            return size if name == "window_size_left" else (size - 1 if size else None)
    return None


_Counter = Callable[[Arguments], Arithmetic]


def _forward(*names: str, heads_first: bool = True, bottom: bool = False) -> _Counter:
    def count(call: Arguments) -> Arithmetic:
        layout = _Layout(call, (names[0], names[1], names[2]), heads_first=heads_first)
        pairs = layout.pairs(_causal(call, bottom=bottom), _window(call))
        return _attend(pairs, layout.width, layout.value_width, layout.shapes)

    return count


def _backward(*names: str, heads_first: bool = True, bottom: bool = False) -> _Counter:
    def count(call: Arguments) -> Arithmetic:
        layout = _Layout(call, (names[0], names[1], names[2]), heads_first=heads_first)
        pairs = layout.pairs(_causal(call, bottom=bottom), _window(call))
        mask = tuple(call.get("grad_input_mask", (True, True, True)))
        return _attend_backward(pairs, layout.width, layout.value_width, layout.shapes, mask)

    return count


def _sequences(tensor: torch.Tensor) -> list[int]:
    """Lengths of the sequences of a (batch, length, width) tensor, nested or not."""
    if tensor.is_nested:
        return [int(length) for length in tensor._nested_tensor_size()[:, 0].tolist()]
    return [int(tensor.shape[1])] * int(tensor.shape[0])


def _multi_head(lengths: list[int], width: int, weights: list[torch.Tensor]) -> Arithmetic:
    """Products with the weights at every position, and attention of all pairs with heads of `width` in sum."""
    products = 2 * sum(lengths) * sum(int(weight.numel()) for weight in weights)
    flops = products + 2 * 2 * width * sum(length * length for length in lengths)
    return Arithmetic(flops, flops, "")


def _fused_attention(call: Arguments) -> Arithmetic:
    weights = [call["qkv_weight"], call["proj_weight"]]
    return _multi_head(_sequences(call["query"]), int(call["embed_dim"]), weights)


def _fused_layer(call: Arguments) -> Arithmetic:
    names = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    return _multi_head(_sequences(call["src"]), int(call["embed_dim"]), [call[name] for name in names])


_QKV = ("query", "key", "value")
_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

ATTENTION: dict[tuple[str, str], _Counter] = {
    **{("aten", f"_scaled_dot_product_{kind}"): _forward(*_QKV) for kind in _KINDS},
    **{("aten", f"_scaled_dot_product_{kind}_backward"): _backward(*_QKV) for kind in _KINDS},
    ("aten", "_scaled_dot_product_fused_attention_overrideable"): _forward(*_QKV),
    ("aten", "_scaled_dot_product_fused_attention_overrideable_backward"): _backward(*_QKV),
    ("aten", "_flash_attention_forward"): _forward(*_QKV, heads_first=False, bottom=True),
    ("aten", "_flash_attention_backward"): _backward(*_QKV, heads_first=False, bottom=True),
    ("aten", "_efficient_attention_forward"): _forward(*_QKV, heads_first=False),
    ("aten", "_efficient_attention_backward"): _backward(*_QKV, heads_first=False),
    ("aten", "_cudnn_attention_forward"): _forward(*_QKV),
    ("aten", "_cudnn_attention_backward"): _backward(*_QKV),
    ("aten", "_native_multi_head_attention"): _fused_attention,
    ("aten", "_triton_multi_head_attention"): _fused_attention,
    ("aten", "_transformer_encoder_layer_fwd"): _fused_layer,
    # The operators of the package flash-attn (2.6 and later), which Hugging Face models call.
    ("flash_attn", "_flash_attn_forward"): _forward("q", "k", "v", heads_first=False, bottom=True),
    ("flash_attn", "_flash_attn_backward"): _backward("q", "k", "v", heads_first=False, bottom=True),
    ("flash_attn", "_flash_attn_varlen_forward"): _forward("q", "k", "v", heads_first=False, bottom=True),
    ("flash_attn", "_flash_attn_varlen_backward"): _backward("q", "k", "v", heads_first=False, bottom=True),
}
