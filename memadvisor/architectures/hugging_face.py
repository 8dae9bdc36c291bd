"""Hugging Face's config.json -> Architecture. What a key's absence means is what the model's own class takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from memadvisor.architecture import Architecture, Experts, LatentAttention
from memadvisor.architectures.config_values import Config, whole
from memadvisor.architectures.encoder_decoders import ENCODER_DECODER_READERS
from memadvisor.architectures.reference_code import code_of
from memadvisor.errors import UsageError

_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}


def architecture_from_config(config: Config, name: str) -> Architecture:
    """The language model that a config.json describes. Raises UsageError for a type that is not known or a key that is
    missing.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    kind = config.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise UsageError(
            f"model_type {kind!r} of {name!r} is not known.",
            hint=f"known are {', '.join(sorted(_READERS))}; or write a TOML file of the shapes (docs/estimate.md).",
        )
    try:
        found = reader(config, name)
        return dataclasses.replace(found, code=found.code or code_of(config, found))
    except KeyError as error:
        raise UsageError(f"{name!r} has no {error.args[0]!r}.", hint="it is no whole config.json.") from error


def _base(config: Config, name: str, *, gated: bool, tied: bool) -> Architecture:
    hidden, n_layers, n_heads, vocab = (whole(config, *keys) for keys in _NAMES.values())
    head_dim = whole(config, "head_dim", default=0)
    if not head_dim:
        if hidden % n_heads:
            raise UsageError(f"{n_heads} heads do not divide hidden {hidden} of {name!r}.")
        head_dim = hidden // n_heads
    return Architecture(
        name=name,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=whole(config, "num_key_value_heads", default=n_heads),
        head_dim=head_dim,
        ffn=whole(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocab=vocab,
        tied_embeddings=bool(config.get("tie_word_embeddings", tied)),
        gated_mlp=gated,
    )


def _llama(config: Config, name: str) -> Architecture:
    attention = bool(config.get("attention_bias", False))
    return dataclasses.replace(
        _base(config, name, gated=True, tied=False),
        qkv_biases=attention,
        output_bias=attention,
        mlp_biases=bool(config.get("mlp_bias", False)),
    )


def _mistral(config: Config, name: str) -> Architecture:
    return _base(config, name, gated=True, tied=False)


def _mixtral(config: Config, name: str) -> Architecture:
    base = _base(config, name, gated=True, tied=False)
    experts = Experts(
        num_experts=whole(config, "num_local_experts"),
        experts_per_token=whole(config, "num_experts_per_tok"),
        expert_ffn=base.ffn,
    )
    return dataclasses.replace(base, experts=experts)


def _qwen2(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_base(config, name, gated=True, tied=False), qkv_biases=True)


def _qwen_experts(config: Config, shared_ffn: int) -> Experts:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UsageError("experts in some layers alone (mlp_only_layers, decoder_sparse_step) are not known.")
    return Experts(
        num_experts=whole(config, "num_experts", "num_local_experts"),
        experts_per_token=whole(config, "num_experts_per_tok"),
        expert_ffn=whole(config, "moe_intermediate_size"),
        shared_ffn=shared_ffn,
        shared_gate=shared_ffn > 0,
    )


def _qwen2_moe(config: Config, name: str) -> Architecture:
    shared = whole(config, "shared_expert_intermediate_size", default=0)
    return dataclasses.replace(_qwen2(config, name), experts=_qwen_experts(config, shared))


def _qwen3(config: Config, name: str) -> Architecture:
    base = _llama(config, name)
    return dataclasses.replace(base, qk_norm=2 * base.head_dim)


def _qwen3_moe(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_qwen3(config, name), experts=_qwen_experts(config, 0))


def _gemma(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_base(config, name, gated=True, tied=True))


def _gemma2(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_gemma(config, name), norms_per_layer=4)


def _gemma3(config: Config, name: str) -> Architecture:
    base = _gemma2(config, name)
    return dataclasses.replace(base, qk_norm=2 * base.head_dim)


def _olmo(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_llama(config, name), norm_vectors=0)


def _olmo2(config: Config, name: str) -> Architecture:
    base = _llama(config, name)
    return dataclasses.replace(base, qk_norm=(base.n_heads + base.n_kv_heads) * base.head_dim)


def _olmoe(config: Config, name: str) -> Architecture:
    base = _olmo2(config, name)
    experts = Experts(
        num_experts=whole(config, "num_experts"),
        experts_per_token=whole(config, "num_experts_per_tok"),
        expert_ffn=base.ffn,
    )
    return dataclasses.replace(base, experts=experts)


def _cohere(config: Config, name: str) -> Architecture:
    if config.get("use_qk_norm"):
        raise UsageError("norms over queries and keys (use_qk_norm) of this type are not known.")
    return dataclasses.replace(_llama(config, name), tied_embeddings=True, norms_per_layer=1)


def _stablelm(config: Config, name: str) -> Architecture:
    if config.get("qk_layernorm") or config.get("use_parallel_residual"):
        raise UsageError("qk_layernorm and use_parallel_residual of this type are not known.")
    biases = bool(config.get("use_qkv_bias", False))
    return dataclasses.replace(_base(config, name, gated=True, tied=False), qkv_biases=biases, norm_vectors=2)


def _deepseek(config: Config, name: str) -> Architecture:
    if config.get("moe_layer_freq", 1) != 1:
        raise UsageError("experts in some layers alone (moe_layer_freq) are not known.")
    rope, nope = whole(config, "qk_rope_head_dim"), whole(config, "qk_nope_head_dim")
    latent = LatentAttention(
        kv_rank=whole(config, "kv_lora_rank"),
        q_rank=whole(config, "q_lora_rank", default=0) or None,
        rope_head_dim=rope,
        nope_head_dim=nope,
        value_head_dim=whole(config, "v_head_dim"),
    )
    expert_ffn = whole(config, "moe_intermediate_size")
    experts = Experts(
        num_experts=whole(config, "n_routed_experts"),
        experts_per_token=whole(config, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * whole(config, "n_shared_experts", default=0),
        first_dense=whole(config, "first_k_dense_replace", default=0),
        groups=whole(config, "n_group", default=1) or 1,
        groups_per_token=whole(config, "topk_group", default=1) or 1,
    )
    base = _base({**config, "head_dim": rope + nope}, name, gated=True, tied=False)
    return dataclasses.replace(base, latent=latent, experts=experts)


def _plain(config: Config, name: str, *, tied: bool = True, positions: int = 0) -> Architecture:
    """Two matrices, biases, LayerNorm."""
    return dataclasses.replace(
        _base(config, name, gated=False, tied=tied), biases=True, norm_vectors=2, positions=positions
    )


def _gpt2(config: Config, name: str) -> Architecture:
    return _plain(
        config, name, positions=whole(config, "n_positions", "max_position_embeddings", default=1024)
    )


def _gpt_bigcode(config: Config, name: str) -> Architecture:
    base = _gpt2(config, name)
    return dataclasses.replace(base, n_kv_heads=1) if config.get("multi_query", True) else base


def _gptj(config: Config, name: str) -> Architecture:
    return dataclasses.replace(
        _plain(config, name, tied=False), biases=False, mlp_biases=True, norms_per_layer=1, head_bias=True
    )


def _gpt_neox(config: Config, name: str) -> Architecture:
    base = _plain(config, name, tied=False)
    if config.get("attention_bias", True):
        return base
    return dataclasses.replace(base, biases=False, mlp_biases=True)


def _opt(config: Config, name: str) -> Architecture:
    hidden = whole(config, "hidden_size")
    if whole(config, "word_embed_proj_dim", default=hidden) != hidden or not config.get(
        "do_layer_norm_before", True
    ):
        raise UsageError("an OPT that projects its embedding, or has its norms behind, is not known.")
    return _plain(config, name, positions=whole(config, "max_position_embeddings") + 2)


def _bloom(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_plain(config, name), embedding_norm=True)


def _mpt(config: Config, name: str) -> Architecture:
    ratio = whole(config, "expansion_ratio", default=4)
    base = _plain({**config, "intermediate_size": ratio * whole(config, "d_model")}, name)
    return dataclasses.replace(base, biases=False, norm_vectors=1)


def _falcon(config: Config, name: str) -> Architecture:
    parallel, new = bool(config.get("parallel_attn", True)), bool(config.get("new_decoder_architecture"))
    shape = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    base = _plain({**shape, "intermediate_size": config.get("ffn_hidden_size")}, name)
    if new:
        kv_heads = whole(config, "num_kv_heads", default=base.n_heads)
        norms = whole(config, "num_ln_in_parallel_attn", default=2)
    else:
        kv_heads = 1 if config.get("multi_query", True) else base.n_heads
        norms = 1 if parallel else 2
    return dataclasses.replace(
        base, biases=bool(config.get("bias", False)), n_kv_heads=kv_heads, norms_per_layer=norms
    )


def _phi(config: Config, name: str) -> Architecture:
    if config.get("qk_layernorm"):
        raise UsageError("qk_layernorm of this type is not known.")
    return dataclasses.replace(_plain(config, name, tied=False), norms_per_layer=1, head_bias=True)


def _starcoder2(config: Config, name: str) -> Architecture:
    base = _plain(config, name)
    return base if config.get("use_bias", True) else dataclasses.replace(base, biases=False)


_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _mistral,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "cohere": _cohere,
    "granite": _llama,
    "smollm3": lambda config, name: dataclasses.replace(
        _llama(config, name), tied_embeddings=bool(config.get("tie_word_embeddings", True))
    ),
    "stablelm": _stablelm,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
    "starcoder2": _starcoder2,
    **ENCODER_DECODER_READERS,
}
