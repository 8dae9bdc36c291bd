"""Published models with recurrences, by name: what their config.json says, read as any other (config_hybrids.py)."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_values import Config
from memadvisor.architectures.hugging_face import architecture_from_config

_QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "intermediate_size": 5120, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_QWEN3_5_MOE = {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_QWEN3_5 = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 12288, "vocab_size": 248320,
}  # fmt: skip
_SMALL_QWEN3_5 = {**_QWEN3_5, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True}  # fmt: skip
_LARGE_QWEN3_5_MOE = {**_QWEN3_5_MOE, "num_attention_heads": 32, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64}  # fmt: skip
_JAMBA = {
    "model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 65536,
}  # fmt: skip
_MAMBA = {"model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560, "vocab_size": 50280}
_FALCON_MAMBA = {
    "model_type": "falcon_mamba", "num_hidden_layers": 64, "hidden_size": 4096, "vocab_size": 65024,
    "tie_word_embeddings": False,
}  # fmt: skip
_MAMBA2 = {
    "model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 2560, "num_heads": 80, "n_groups": 1, "vocab_size": 50288,
    "tie_word_embeddings": True,
}  # fmt: skip
_NEMOTRON_H = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 21504, "vocab_size": 131072,
}  # fmt: skip
_NEMOTRON_3_NANO = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "intermediate_size": 1856, "vocab_size": 131072,
    "mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}  # fmt: skip
_NEMOTRON_NANO_2 = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "hidden_size": 4480, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 15680,
    "vocab_size": 131072, "mamba_num_heads": 128, "mamba_head_dim": 80,
}  # fmt: skip
_GRANITE_4_SMALL = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "intermediate_size": 768, "vocab_size": 100352,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 128, "tie_word_embeddings": True,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
}  # fmt: skip
_KIMI_LINEAR = {
    "model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 72, "intermediate_size": 9216, "vocab_size": 163840, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
_BAMBA = {
    "model_type": "bamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "mamba_d_state": 128, "attn_layer_indices": [9, 18, 27],
}  # fmt: skip

# https://huggingface.co/Qwen, ai21labs, state-spaces, tiiuae, nvidia, ibm-ai-platform, ibm-granite and moonshotai, config.json of each.
# Qwen3.5's as THUDM/slime's scripts and Megatron Bridge's recipes have them.
_CONFIGS: dict[str, Config] = {
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    "qwen3.5-35b-a3b": _QWEN3_5_MOE,
    "qwen3.5-9b": _QWEN3_5,
    "qwen3.5-0.8b": {**_SMALL_QWEN3_5, "hidden_size": 1024, "intermediate_size": 3584},
    "qwen3.5-2b": {**_SMALL_QWEN3_5, "hidden_size": 2048, "intermediate_size": 6144},
    "qwen3.5-4b": {**_QWEN3_5, "hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "qwen3.5-27b": {
        **_QWEN3_5, "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24, "intermediate_size": 17408,
        "linear_num_value_heads": 48,
    },
    "qwen3.5-122b-a10b": {**_LARGE_QWEN3_5_MOE, "num_hidden_layers": 48, "hidden_size": 3072},
    "qwen3.5-397b-a17b": {
        **_LARGE_QWEN3_5_MOE, "num_hidden_layers": 60, "hidden_size": 4096, "num_experts": 512, "num_experts_per_tok": 10,
    },
    "jamba-v0.1": _JAMBA,
    "jamba-1.5-large": {
        **_JAMBA, "num_hidden_layers": 72, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 24576,
    },
    "mamba-2.8b": _MAMBA,
    "falcon-mamba-7b": _FALCON_MAMBA,
    "mamba2-2.7b": _MAMBA2,
    "nemotron-h-8b": _NEMOTRON_H,
    "nemotron-3-nano-30b-a3b": _NEMOTRON_3_NANO,
    "nemotron-nano-9b-v2": _NEMOTRON_NANO_2,
    "granite-4.0-h-small": _GRANITE_4_SMALL,
    "kimi-linear-48b-a3b": _KIMI_LINEAR,
    "bamba-9b": _BAMBA,
}  # fmt: skip

HYBRID_FAMILY: tuple[Architecture, ...] = tuple(
    architecture_from_config(config, name) for name, config in _CONFIGS.items()
)
