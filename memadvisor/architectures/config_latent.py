"""Decoders with latent attention out of a Hugging Face config.json (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memadvisor.architecture import Architecture, LatentAttention
from memadvisor.architectures.config_experts import deepseek_experts
from memadvisor.architectures.config_shapes import base
from memadvisor.architectures.config_values import Config, whole
from memadvisor.errors import UsageError


def latent_dense(config: Config, name: str, *, tied: bool = False) -> Architecture:
    """Without experts."""
    rope, nope = whole(config, "qk_rope_head_dim"), whole(config, "qk_nope_head_dim")
    latent = LatentAttention(
        kv_rank=whole(config, "kv_lora_rank"),
        q_rank=whole(config, "q_lora_rank", default=0) or None,
        rope_head_dim=rope,
        nope_head_dim=nope,
        value_head_dim=whole(config, "v_head_dim"),
    )
    if config.get("mlp_bias"):
        raise UsageError("biases of feed-forward blocks (mlp_bias) beside latent attention are not known.")
    found = base({**config, "head_dim": rope + nope}, name, gated=True, tied=tied)
    biased = bool(config.get("attention_bias", False))
    return dataclasses.replace(found, latent=latent, qkv_biases=biased, output_bias=biased)


def _tied(config: Config, name: str) -> Architecture:
    return latent_dense(config, name, tied=True)


def _deepseek(config: Config, name: str) -> Architecture:
    return dataclasses.replace(latent_dense(config, name), experts=deepseek_experts(config))


def _one_dense(config: Config, name: str) -> Architecture:
    """The first layer is dense, and one shared expert beside the others, where the config does not say."""
    experts = deepseek_experts({"first_k_dense_replace": 1, **config}, shared=1)
    return dataclasses.replace(latent_dense(config, name), experts=experts)


def _sparse(config: Config, name: str) -> Architecture:
    """Each layer has an indexer, whose best keys are all that its attention sees."""
    if any(kind != "full" for kind in config.get("indexer_types") or []):
        raise UsageError("layers that use another layer's indexer (indexer_types) are not known.")
    found = _one_dense({"first_k_dense_replace": 3, "q_lora_rank": 1536, **config}, name)
    heads = whole(config, "index_n_heads", default=64)
    width = whole(config, "index_head_dim", default=128)
    latent = found.latent and dataclasses.replace(found.latent, index_heads=heads, index_head_dim=width)
    return dataclasses.replace(found, latent=latent, window=whole(config, "index_topk", default=2048))


def _longcat(config: Config, name: str) -> Architecture:
    """Each layer is attention, a dense block, both again, and experts whose result comes in behind it all: here the experts are
    behind what they run beside. Some are no experts but hand the token on (zero_expert_num), and cost as much."""
    zero = whole(config, "zero_expert_num", default=256, least=0)
    num_experts, chosen = whole(config, "n_routed_experts"), whole(config, "moe_topk")
    words = {
        "num_hidden_layers": 5 * whole(config, "num_layers"), "intermediate_size": config.get("ffn_hidden_size"),
        "moe_intermediate_size": config.get("expert_ffn_hidden_size"), "q_lora_rank": 1536,
        "num_experts_per_tok": max(1, round(chosen * num_experts / (num_experts + zero))),
    }  # fmt: skip
    found = _deepseek({**words, **config, "num_hidden_layers": words["num_hidden_layers"]}, name)
    beside = (
        (zero - 1) * found.hidden * (found.n_layers // 5)
    )  # more columns of the router, and one norm fewer
    return dataclasses.replace(found, layer_pattern="AFAFE", around=beside)


LATENT_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _sparse,
    "glm4_moe_lite": _one_dense,
    "glm_moe_dsa": _sparse,
    "longcat_flash": _longcat,
    "minicpm3": _tied,
    "mistral4": _deepseek,
    "sarvam_mla": _deepseek,
    "youtu": _tied,
}
