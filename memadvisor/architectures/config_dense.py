"""Dense decoders out of a Hugging Face config.json. What a key's absence means is what the model's own class takes. Windows are
config_windows.py's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_shapes import base, llama, plain
from memadvisor.architectures.config_values import Config, whole
from memadvisor.errors import UsageError

_WIDE_HEAD = 128  # of classes whose heads do not follow from the width


def _mistral(config: Config, name: str) -> Architecture:
    return base(config, name, gated=True, tied=False)


def _wide(config: Config) -> Config:
    return {"head_dim": _WIDE_HEAD, **config}


def _cwm(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_ministral3(config, name), mlp_biases=bool(config.get("mlp_bias", False)))


def _ministral3(config: Config, name: str) -> Architecture:
    return _mistral(_wide(config), name)


def qwen2(config: Config, name: str) -> Architecture:
    """Biases of queries, keys and values, whatever the config says."""
    return dataclasses.replace(base(config, name, gated=True, tied=False), qkv_biases=True)


def _seed_oss(config: Config, name: str) -> Architecture:
    return dataclasses.replace(
        llama(_wide(config), name),
        qkv_biases=bool(config.get("attention_bias", True)),
        output_bias=bool(config.get("attention_out_bias", False)),
    )


def _glm(config: Config, name: str) -> Architecture:
    return dataclasses.replace(
        base(_wide(config), name, gated=True, tied=False), qkv_biases=bool(config.get("attention_bias", True))
    )


def _glm4(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_glm(config, name), norms_per_layer=4)


def qwen3(config: Config, name: str) -> Architecture:
    """Norms over each head's queries and keys."""
    found = llama(config, name)
    return dataclasses.replace(found, qk_norm=2 * found.head_dim)


def _gemma(config: Config, name: str) -> Architecture:
    return llama({**config, "mlp_bias": False}, name, tied=True)


def _gemma2(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_gemma(config, name), norms_per_layer=4)


def _gemma3(config: Config, name: str) -> Architecture:
    found = _gemma2(config, name)
    return dataclasses.replace(found, qk_norm=2 * found.head_dim)


def _granite_swa(config: Config, name: str) -> Architecture:
    return dataclasses.replace(llama(config, name, tied=True), attention_sinks=True)


def _nanochat(config: Config, name: str) -> Architecture:
    """Norms without weights."""
    return dataclasses.replace(llama(config, name), gated_mlp=False, norm_vectors=0)


def _olmo(config: Config, name: str) -> Architecture:
    return dataclasses.replace(llama(config, name), norm_vectors=0)


def olmo2(config: Config, name: str) -> Architecture:
    """Norms over all queries and all keys."""
    found = llama(config, name)
    return dataclasses.replace(found, qk_norm=(found.n_heads + found.n_kv_heads) * found.head_dim)


def _cohere(config: Config, name: str) -> Architecture:
    found = llama(config, name, tied=True)
    columns = (found.n_heads + found.n_kv_heads) * found.head_dim
    qk_norm = columns if config.get("use_qk_norm") else 0
    return dataclasses.replace(found, qk_norm=qk_norm, norms_per_layer=1)


def _stablelm(config: Config, name: str) -> Architecture:
    if config.get("qk_layernorm") or config.get("use_parallel_residual"):
        raise UsageError("qk_layernorm and use_parallel_residual of this type are not known.")
    biases = bool(config.get("use_qkv_bias", False))
    return dataclasses.replace(base(config, name, gated=True, tied=False), qkv_biases=biases, norm_vectors=2)


def _ernie(config: Config, name: str) -> Architecture:
    return dataclasses.replace(
        base(_wide(config), name, gated=True, tied=True), biases=bool(config.get("use_bias", False))
    )


def _hyperclovax(config: Config, name: str) -> Architecture:
    norms = 4 if config.get("use_post_norm", True) else 2
    return dataclasses.replace(llama(config, name), norms_per_layer=norms)


def _smollm3(config: Config, name: str) -> Architecture:
    return llama(config, name, tied=True)


def _arcee(config: Config, name: str) -> Architecture:
    return dataclasses.replace(llama(config, name), gated_mlp=False)


def _apertus(config: Config, name: str) -> Architecture:
    """Two numbers of each layer are its activation function's."""
    return dataclasses.replace(qwen3(config, name), gated_mlp=False, beside=2)


def _bitnet(config: Config, name: str) -> Architecture:
    """Norms before the last product of attention and of the feed-forward block; matrices are trained in 16 bits."""
    found = llama(config, name)
    return dataclasses.replace(found, beside=found.n_heads * found.head_dim + found.ffn)


def _nemotron(config: Config, name: str) -> Architecture:
    return dataclasses.replace(llama(config, name), gated_mlp=False, norm_vectors=2)


def _jais2(config: Config, name: str) -> Architecture:
    with_biases = {"attention_bias": True, "mlp_bias": True, **config}
    return _nemotron(with_biases, name)


def _gpt2(config: Config, name: str) -> Architecture:
    return plain(
        config, name, positions=whole(config, "n_positions", "max_position_embeddings", default=1024)
    )


def _openai_gpt(config: Config, name: str) -> Architecture:
    found = plain(config, name, positions=whole(config, "n_positions", default=512))
    return dataclasses.replace(found, final_norm=False)


def _gpt_neo(config: Config, name: str) -> Architecture:
    found = plain(config, name, positions=whole(config, "max_position_embeddings", default=2048))
    return dataclasses.replace(found, biases=False, output_bias=True, mlp_biases=True)


def _gpt_bigcode(config: Config, name: str) -> Architecture:
    found = _gpt2(config, name)
    kv_heads = 1 if config.get("multi_query", True) else found.n_heads
    return dataclasses.replace(found, n_kv_heads=kv_heads)


def _gptj(config: Config, name: str) -> Architecture:
    return dataclasses.replace(
        plain(config, name, tied=False), biases=False, mlp_biases=True, norms_per_layer=1, head_bias=True
    )


def _gpt_neox(config: Config, name: str) -> Architecture:
    found = plain(config, name, tied=False)
    if config.get("attention_bias", True):
        return found
    return dataclasses.replace(found, biases=False, mlp_biases=True)


def _opt(config: Config, name: str) -> Architecture:
    hidden = whole(config, "hidden_size")
    if whole(config, "word_embed_proj_dim", default=hidden) != hidden or not config.get(
        "do_layer_norm_before", True
    ):
        raise UsageError("an OPT that projects its embedding, or has its norms behind, is not known.")
    return dataclasses.replace(
        _biogpt(config, name),
        biases=bool(config.get("enable_bias", True)),
        norm_vectors=2 if config.get("layer_norm_elementwise_affine", True) else 0,
        final_norm=not config.get("_remove_final_layer_norm", False),
    )


def _biogpt(config: Config, name: str) -> Architecture:
    return plain(config, name, positions=whole(config, "max_position_embeddings") + 2)


def _bloom(config: Config, name: str) -> Architecture:
    return dataclasses.replace(plain(config, name), embedding_norm=True)


def _mpt(config: Config, name: str) -> Architecture:
    ratio = whole(config, "expansion_ratio", default=4)
    found = plain({**config, "intermediate_size": ratio * whole(config, "d_model")}, name)
    return dataclasses.replace(found, biases=False, norm_vectors=1)


def _falcon(config: Config, name: str) -> Architecture:
    parallel, new = bool(config.get("parallel_attn", True)), bool(config.get("new_decoder_architecture"))
    shape = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    found = plain({**shape, "intermediate_size": config.get("ffn_hidden_size")}, name)
    if new:
        kv_heads = whole(config, "num_kv_heads", default=found.n_heads)
        norms = whole(config, "num_ln_in_parallel_attn", default=2)
    else:
        kv_heads = 1 if config.get("multi_query", True) else found.n_heads
        norms = 1 if parallel else 2
    return dataclasses.replace(
        found, biases=bool(config.get("bias", False)), n_kv_heads=kv_heads, norms_per_layer=norms
    )


def _phi(config: Config, name: str) -> Architecture:
    if config.get("qk_layernorm"):
        raise UsageError("qk_layernorm of this type is not known.")
    return dataclasses.replace(plain(config, name, tied=False), norms_per_layer=1, head_bias=True)


def _persimmon(config: Config, name: str) -> Architecture:
    found = plain(config, name, tied=False)
    return dataclasses.replace(found, qk_norm=4 * found.head_dim if config.get("qk_layernorm", True) else 0)


def _starcoder2(config: Config, name: str) -> Architecture:
    found = plain(config, name)
    return found if config.get("use_bias", True) else dataclasses.replace(found, biases=False)


DENSE_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "biogpt": _biogpt,
    "bitnet": _bitnet,
    "bloom": _bloom,
    "codegen": _gptj,
    "cohere": _cohere,
    "cohere2": _cohere,
    "cwm": _cwm,
    "ernie4_5": _ernie,
    "exaone": llama,
    "exaone4": qwen3,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granite": llama,
    "granite_swa": _granite_swa,
    "helium": llama,
    "hunyuan_v1_dense": qwen3,
    "hyperclovax": _hyperclovax,
    "internlm3": llama,
    "iquestcoder": llama,
    "jais2": _jais2,
    "llama": llama,
    "ministral": _mistral,
    "ministral3": _ministral3,
    "mistral": _mistral,
    "mpt": _mpt,
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "openai-gpt": _openai_gpt,
    "opt": _opt,
    "persimmon": _persimmon,
    "phi": _phi,
    "phi3": _mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "vaultgemma": _gemma,
    "xglm": plain,
}
