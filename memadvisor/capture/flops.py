"""FLOPs of operators: 2 per multiply-add of matrix products and convolutions; elementwise work counts 0.

Shapes are torch's own operator arguments. torch.utils.flop_counter knows matrix products and
convolutions; attention is counted here, because it counts CPU attention as 0 (pytorch#195460) and the
backward's internal recomputation of fused attention as needed work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

# Forward attention is two products (QK', PV); its backward needs four (dV, dP, dQ, dK), and a fused
# one runs QK' once more (arXiv:2205.14135, section 3.2).
_NEEDED_BACKWARD, _EXECUTED_BACKWARD = 4, 5


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    """(executed, needed) FLOPs of one call; (0, 0) for operators without matrix arithmetic."""
    packet = func._overloadpacket
    attention = _ATTENTION.get(packet.__name__)
    if attention is not None:
        return attention(func, args, kwargs)
    if packet.__name__ == "mkldnn_rnn_layer":
        flops = _recurrent_flops(args)
        return flops, flops
    if packet.__name__ == "mkldnn_rnn_layer_backward":
        flops = 2 * _recurrent_flops(args)
        return flops, flops
    count = flop_registry.get(packet)
    if count is None:
        return 0, 0
    flops = int(count(*args, **kwargs, out_val=out))
    return flops, flops


def _attention_pairs(query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> int:
    """Query-key pairs that the model needs, over batch and heads; causal: T(T+1)/2 when both are T long."""
    queries, keys = query.shape[-2], key.shape[-2]
    batch = query.numel() // (queries * query.shape[-1])
    if not causal:
        return batch * queries * keys
    shorter = min(queries, keys)
    return batch * (shorter * (shorter + 1) // 2 + (queries - shorter) * keys)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else default
    return default


def _forward_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    query, key, value = args[:3]
    causal = bool(_argument(func, args, kwargs, "is_causal", False))
    pairs = _attention_pairs(query, key, causal=causal)
    flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
    return flops, flops


def _backward_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    query, key, value = args[1:4]
    causal = bool(_argument(func, args, kwargs, "is_causal", False))
    one_product = 2 * _attention_pairs(query, key, causal=causal) * (query.shape[-1] + value.shape[-1]) // 2
    return _EXECUTED_BACKWARD * one_product, _NEEDED_BACKWARD * one_product


def _recurrent_flops(args: tuple[Any, ...]) -> int:
    """input (T, B, I), weights (G, I) and (G, H): 2·T·B·G·(I + H)."""
    inputs, weight_input, weight_hidden = args[:3]
    steps_by_batch = inputs.numel() // inputs.shape[-1]
    return int(2 * steps_by_batch * (weight_input.numel() + weight_hidden.numel()))


_ATTENTION: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[int, int]]] = {
    **{
        f"_scaled_dot_product_{kind}": _forward_attention
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    **{
        f"_scaled_dot_product_{kind}_backward": _backward_attention
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
}
