"""What a model's own class takes where its config.json does not say, of keys that its shape follows from (transformers 5.24).

Other keys' defaults are where they are read. A file that transformers wrote says them all; one written by hand may not.
"""

from __future__ import annotations

from memadvisor.architectures.config_values import Config, whole

_HEAD_DIMS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "vaultgemma"), 256),
    **dict.fromkeys(("afmoe", "hy_v3", "internlm3", "iquestcoder", "mellum", "qwen3"), 128),
}
_KEY_VALUE_HEADS = {
    **dict.fromkeys(("ernie4_5", "glm", "glm4", "internlm3", "qwen3_5_moe_text", "qwen3_next", "starcoder2"), 2),
    **dict.fromkeys(
        ("ernie4_5_moe", "gemma2", "gemma3_text", "granite_swa", "mellum", "qwen3_5_text", "qwen3_moe", "smollm3", "vaultgemma"), 4
    ),
    **dict.fromkeys(
        ("bamba", "cwm", "exaone", "falcon_h1", "glm4_moe", "gpt_oss", "hy_v3", "iquestcoder", "jamba", "llama4_text",
         "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nemotron_h", "phimoe", "seed_oss", "solar_open"), 8
    ),
}  # fmt: skip
_OTHERS: dict[str, Config] = {
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "glm4_moe_lite": {"q_lora_rank": 768},
    "minicpm3": {"q_lora_rank": 768},
    "mistral4": {"q_lora_rank": 1024, "n_shared_experts": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 5632},
    "sarvam_mla": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "youtu": {"q_lora_rank": 1536},
}


def with_defaults(kind: str, config: Config) -> Config:
    """The config with what its class adds; heads of keys and values only where their number divides the heads of queries."""
    usual = dict(_OTHERS.get(kind, {}))
    if kind in _HEAD_DIMS:
        usual["head_dim"] = _HEAD_DIMS[kind]
    kv_heads = _KEY_VALUE_HEADS.get(kind, 0)
    if kv_heads and whole(config, "num_attention_heads", default=1) % kv_heads == 0:
        usual["num_key_value_heads"] = kv_heads
    return {**usual, **config}
