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
_BAMBA = {
    "model_type": "bamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "mamba_d_state": 128, "attn_layer_indices": [9, 18, 27],
}  # fmt: skip

# https://huggingface.co/Qwen, ai21labs, state-spaces, tiiuae, nvidia and ibm-ai-platform, config.json of each.
_CONFIGS: dict[str, Config] = {
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    "qwen3.5-35b-a3b": _QWEN3_5_MOE,
    "qwen3.5-9b": _QWEN3_5,
    "jamba-v0.1": _JAMBA,
    "mamba-2.8b": _MAMBA,
    "falcon-mamba-7b": _FALCON_MAMBA,
    "mamba2-2.7b": _MAMBA2,
    "nemotron-h-8b": _NEMOTRON_H,
    "nemotron-3-nano-30b-a3b": _NEMOTRON_3_NANO,
    "bamba-9b": _BAMBA,
}

HYBRID_FAMILY: tuple[Architecture, ...] = tuple(
    architecture_from_config(config, name) for name, config in _CONFIGS.items()
)
