"""Decoders with experts out of a Hugging Face config.json. What a key's absence means is what the model's own class takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from memadvisor.architecture import Architecture, Experts
from memadvisor.architectures.config_dense import olmo2, qwen2, qwen3
from memadvisor.architectures.config_shapes import base, llama
from memadvisor.architectures.config_values import Config, layer_numbers, whole
from memadvisor.errors import UsageError


def in_layers(experts: Experts, layers: Sequence[int], n_layers: int, keys: str) -> Experts | None:
    """With experts in these layers of so many; None where they are none. Raises UsageError, which names the `keys` of the
    config, where they do not follow each other at one distance up to the end.
    """
    if not layers:
        return None
    first, every = layers[0], layers[1] - layers[0] if len(layers) > 1 else n_layers
    if every < 1 or list(layers) != list(range(first, n_layers, every)):
        raise UsageError(
            f"experts in layers {', '.join(map(str, layers))} of {n_layers} ({keys}) are not known.",
            hint="dense layers come first, and then each second, third, ... layer has experts, up to the last one.",
        )
    return dataclasses.replace(experts, first_dense=first, every=every)


def _experts(config: Config, ffn: int) -> Experts:
    """In all layers, each as wide as a dense layer's block."""
    return Experts(
        num_experts=whole(config, "num_local_experts", "num_experts"),
        experts_per_token=whole(config, "num_experts_per_tok"),
        expert_ffn=ffn,
    )


def _mixtral(config: Config, name: str) -> Architecture:
    found = base(config, name, gated=True, tied=False)
    return dataclasses.replace(found, experts=_experts(config, found.ffn))


def _granite(config: Config, name: str) -> Architecture:
    found = llama(config, name)
    experts = _experts({"num_local_experts": 8, "num_experts_per_tok": 2, **config}, found.ffn)
    shared_ffn = whole(config, "shared_intermediate_size", default=0, least=0)
    return dataclasses.replace(found, experts=dataclasses.replace(experts, shared_ffn=shared_ffn))


def _phimoe(config: Config, name: str) -> Architecture:
    found = llama(config, name)
    return dataclasses.replace(
        found,
        norm_vectors=2,
        head_bias=bool(config.get("lm_head_bias", False)),
        experts=_experts(config, found.ffn),
    )


def _gpt_oss(config: Config, name: str) -> Architecture:
    found = base({"head_dim": 64, **config}, name, gated=True, tied=False)
    attention = bool(config.get("attention_bias", True))
    return dataclasses.replace(
        found,
        qkv_biases=attention,
        output_bias=attention,
        mlp_biases=True,
        attention_sinks=True,
        experts=dataclasses.replace(_experts(config, found.ffn), router_bias=True),
    )


def _olmoe(config: Config, name: str) -> Architecture:
    found = olmo2(config, name)
    return dataclasses.replace(found, experts=_experts(config, found.ffn))


def _minimax_m2(config: Config, name: str) -> Architecture:
    return _olmoe({"head_dim": 128, **config}, name)


def _hunyuan(config: Config, name: str) -> Architecture:
    if isinstance(config.get("num_experts"), list) or isinstance(config.get("moe_topk"), list):
        raise UsageError("a list of numbers of experts (num_experts, moe_topk) is not known.")
    found = qwen3(config, name)
    experts = Experts(
        num_experts=whole(config, "num_experts"),
        experts_per_token=whole(config, "moe_topk"),
        expert_ffn=found.ffn,
        shared_ffn=found.ffn,
    )
    return dataclasses.replace(found, experts=experts)


def qwen_experts(config: Config, n_layers: int, shared_ffn: int) -> Experts | None:
    """In each `decoder_sparse_step`th layer that is not one of `mlp_only_layers`."""
    step = whole(config, "decoder_sparse_step", default=1)
    dense = layer_numbers(config, "mlp_only_layers") or []
    layers = [layer for layer in range(step - 1, n_layers, step) if layer not in dense]
    experts = Experts(
        num_experts=whole(config, "num_experts", "num_local_experts"),
        experts_per_token=whole(config, "num_experts_per_tok"),
        expert_ffn=whole(config, "moe_intermediate_size"),
        shared_ffn=shared_ffn,
        shared_gate=shared_ffn > 0,
    )
    return in_layers(experts, layers, n_layers, "mlp_only_layers, decoder_sparse_step")


def _qwen2_moe(config: Config, name: str) -> Architecture:
    shared = whole(config, "shared_expert_intermediate_size", default=0, least=0)
    found = dataclasses.replace(qwen2(config, name), qkv_biases=bool(config.get("qkv_bias", True)))
    return dataclasses.replace(found, experts=qwen_experts(config, found.n_layers, shared))


def _qwen3_moe(config: Config, name: str) -> Architecture:
    found = qwen3(config, name)
    return dataclasses.replace(found, experts=qwen_experts(config, found.n_layers, 0))


def deepseek_experts(config: Config, shared: int = 0) -> Experts | None:
    """Dense layers first, and shared experts (`shared`, where the config does not say) beside the others. A list of what each
    layer has (mlp_layer_types) goes before the number of dense ones."""
    if config.get("moe_layer_freq", 1) != 1:
        raise UsageError(
            f"experts in each layer of a number that {config['moe_layer_freq']!r} divides (moe_layer_freq) are not known.",
            hint="it is 1.",
        )
    expert_ffn = whole(config, "moe_intermediate_size")
    found = Experts(
        num_experts=whole(config, "n_routed_experts", "num_local_experts", "num_experts"),
        experts_per_token=whole(config, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn
        * whole(config, "n_shared_experts", "num_shared_experts", default=shared, least=0),
        first_dense=whole(config, "first_k_dense_replace", default=0, least=0),
        groups=whole(config, "n_group", default=1),
        groups_per_token=whole(config, "topk_group", default=1),
    )
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return found
    sparse = [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    return in_layers(found, sparse, len(kinds), "mlp_layer_types")


def _glm4_moe(config: Config, name: str) -> Architecture:
    """A head's width, where the config does not say, is the stream's over the number of heads, rounded down."""
    first_dense = {"first_k_dense_replace": 1, **config}
    if first_dense.get("head_dim") is None:
        first_dense["head_dim"] = whole(config, "hidden_size") // whole(config, "num_attention_heads")
    found = base(first_dense, name, gated=True, tied=False)
    return dataclasses.replace(
        found,
        qkv_biases=bool(config.get("attention_bias", False)),
        qk_norm=2 * found.head_dim if config.get("use_qk_norm", False) else 0,
        experts=deepseek_experts(first_dense, shared=1),
    )


def _solar_open(config: Config, name: str) -> Architecture:
    found = _mixtral({"head_dim": 128, "num_experts": config.get("n_routed_experts"), **config}, name)
    biased = bool(config.get("attention_bias", False))
    return dataclasses.replace(found, qkv_biases=biased, experts=deepseek_experts(config, shared=1))


def _exaone_moe(config: Config, name: str) -> Architecture:
    first_dense = {"first_k_dense_replace": 1, **config}
    return dataclasses.replace(qwen3(config, name), experts=deepseek_experts(first_dense, shared=1))


def _afmoe(config: Config, name: str) -> Architecture:
    """A gate as wide as the queries; norms before and behind attention and feed-forward."""
    found = qwen3(config, name)
    experts = deepseek_experts(
        {"first_k_dense_replace": whole(config, "num_dense_layers", default=1, least=0), **config}, shared=2
    )
    return dataclasses.replace(
        found,
        norms_per_layer=4,
        attention_gate=True,
        experts=experts and dataclasses.replace(experts, router_bias=True),
    )


def _mellum(config: Config, name: str) -> Architecture:
    return dataclasses.replace(qwen3(config, name), experts=deepseek_experts(config))


def _granite_swa(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_granite(config, name), attention_sinks=True)


def _dbrx(config: Config, name: str) -> Architecture:
    """Norms without biases; its attention and its experts are described in tables inside."""
    attention, experts = (_inner(config, key) for key in ("attn_config", "ffn_config"))
    found = base(
        {**config, "num_key_value_heads": attention.get("kv_n_heads", 1), "ffn_dim": experts.get("ffn_hidden_size", 3584)},
        name,
        gated=True,
        tied=False,
    )  # fmt: skip
    words = {
        "num_experts": experts.get("moe_num_experts", 4),
        "num_experts_per_tok": experts.get("moe_top_k", 1),
    }
    return dataclasses.replace(found, experts=_experts(words, found.ffn))


def _inner(config: Config, key: str) -> Config:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _aria(config: Config, name: str) -> Architecture:
    found = llama(config, name)
    words = {
        "num_experts": config.get("moe_num_experts", 8),
        "num_experts_per_tok": config.get("moe_topk", 2),
    }
    shared = found.ffn * whole(config, "moe_num_shared_experts", default=2, least=0)
    return dataclasses.replace(
        found, experts=dataclasses.replace(_experts(words, found.ffn), shared_ffn=shared)
    )


def _sarvam(config: Config, name: str) -> Architecture:
    return _exaone_moe({"first_k_dense_replace": 1, "head_dim": 64, **config}, name)


def _dots1(config: Config, name: str) -> Architecture:
    return dataclasses.replace(qwen3(config, name), experts=deepseek_experts(config))


def _ernie_moe(config: Config, name: str) -> Architecture:
    if config.get("use_bias"):
        raise UsageError("experts beside products with biases (use_bias) are not known.")
    found = base(config, name, gated=True, tied=True)
    every = whole(config, "moe_layer_interval", default=1)
    start = whole(config, "moe_layer_start_index", default=1, least=0)
    last = config.get("moe_layer_end_index", -1)
    end = found.n_layers if last in (-1, None) else whole(config, "moe_layer_end_index", least=0) + 1
    layers = [layer for layer in range(every - 1, min(end, found.n_layers), every) if layer >= start]
    expert_ffn = whole(config, "moe_intermediate_size")
    experts = Experts(
        num_experts=whole(config, "moe_num_experts"),
        experts_per_token=whole(config, "moe_k"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole(config, "moe_num_shared_experts", default=2, least=0),
        router_bias=True,
    )
    keys = "moe_layer_interval, moe_layer_start_index, moe_layer_end_index"
    return dataclasses.replace(found, experts=in_layers(experts, layers, found.n_layers, keys))


def _llama4(config: Config, name: str) -> Architecture:
    found = llama({"head_dim": 128, **config, "intermediate_size": config.get("intermediate_size_mlp")}, name)
    expert_ffn = whole(config, "intermediate_size")
    step = whole(config, "interleave_moe_layer_step", default=1)
    layers = layer_numbers(config, "moe_layers")
    if layers is None:
        layers = list(range(step - 1, found.n_layers, step))
    experts = dataclasses.replace(_experts(config, expert_ffn), shared_ffn=expert_ffn)
    keys = "moe_layers, interleave_moe_layer_step"
    return dataclasses.replace(found, experts=in_layers(experts, layers, found.n_layers, keys))


EXPERT_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "afmoe": _afmoe,
    "aria_text": _aria,
    "dbrx": _dbrx,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _olmoe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granite,
    "granitemoeshared": _granite,
    "granitemoe_swa": _granite_swa,
    "hunyuan_v1_moe": _hunyuan,
    "hy_v3": _exaone_moe,
    "llama4_text": _llama4,
    "mellum": _mellum,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "sarvam_moe": _sarvam,
    "solar_open": _solar_open,
}
