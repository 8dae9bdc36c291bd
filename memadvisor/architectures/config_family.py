"""More published models, by name: what their config.json says, read as any other."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_values import Config
from memadvisor.architectures.hugging_face import architecture_from_config


def _gated(kind: str, layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocab: int) -> Config:
    """`heads`: of queries, of keys and values."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "intermediate_size": ffn, "vocab_size": vocab,
    }  # fmt: skip


def _granite_moe(layers: int, hidden: int, heads: int, experts: int) -> Config:
    """Its experts are 512 wide, and each token meets eight."""
    return {
        **_gated("granitemoe", layers, hidden, (heads, 8), 512, 49155), "num_local_experts": experts, "num_experts_per_tok": 8,
        "tie_word_embeddings": True,
    }  # fmt: skip


def _gpt2(layers: int, hidden: int, heads: int) -> Config:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048, "vocab_size": 50257}  # fmt: skip


def _codegen(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "codegen",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": 51200,
    }


def _neo(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "gpt_neo", "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": 50257,
        "max_position_embeddings": 2048,
    }  # fmt: skip


def _bigcode(layers: int, hidden: int, heads: int, positions: int, vocab: int) -> Config:
    return {
        "model_type": "gpt_bigcode", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions,
        "vocab_size": vocab,
    }  # fmt: skip


def _xglm(layers: int, hidden: int, ffn: int) -> Config:
    return {"model_type": "xglm", "num_layers": layers, "d_model": hidden, "attention_heads": 16, "ffn_dim": ffn, "vocab_size": 256008}  # fmt: skip


def _neox(layers: int, hidden: int, vocab: int) -> Config:
    return {
        "model_type": "gpt_neox", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 32,
        "intermediate_size": 4 * hidden, "vocab_size": vocab,
    }  # fmt: skip


def _stacks(kind: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: int) -> Config:
    """Encoder and decoder alike."""
    halves = {
        f"{stack}_{key}": value
        for stack in ("encoder", "decoder")
        for key, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", ffn))
    }
    return {"model_type": kind, "d_model": hidden, "vocab_size": vocab, **halves, **more}


def _whisper(layers: int, hidden: int, *, vocab: int = 51865, sounds: int = 80) -> Config:
    found = _stacks("whisper", layers, hidden, hidden // 64, 4 * hidden, vocab)
    return {**found, "num_mel_bins": sounds}


def _encoder(kind: str, layers: int, hidden: int, vocab: int, positions: int = 514, **more: int) -> Config:
    usual = {"num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden, "type_vocab_size": 1}
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab,
        "max_position_embeddings": positions, **usual, **more,
    }  # fmt: skip


_DEEPSEEK_V3 = {
    **_gated("deepseek_v3", 61, 7168, (128, 128), 18432, 129280), "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_group": 8, "topk_group": 4,
}  # fmt: skip
_GLM_5 = {
    **_DEEPSEEK_V3, **_gated("glm_moe_dsa", 78, 6144, (64, 64), 12288, 154880), "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "index_n_heads": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_ERNIE = {"moe_num_experts": 64, "tie_word_embeddings": True}
_GLM_4_7_FLASH = {
    **_gated("glm4_moe_lite", 47, 2048, (20, 20), 10240, 154880), "moe_intermediate_size": 1536, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1,
}  # fmt: skip

# https://huggingface.co/cerebras, Salesforce, EleutherAI, bigcode, facebook, togethercomputer, CohereLabs, ibm-granite, mistralai,
# microsoft, upstage, openlm-research, stabilityai, deepseek-ai, internlm, zai-org, rednote-hilab, baidu, MiniMaxAI, openai,
# google, FacebookAI, tencent (Hunyuan-A52B-Pretrain), inclusionAI, meituan-longcat, XiaomiMiMo (and arXiv:2505.07608): config.json
# of each.
_CONFIGS: dict[str, Config] = {
    "cerebras-gpt-111m": _gpt2(10, 768, 12),
    "cerebras-gpt-590m": _gpt2(18, 1536, 12),
    "cerebras-gpt-1.3b": _gpt2(24, 2048, 16),
    "cerebras-gpt-2.7b": _gpt2(32, 2560, 32),
    "cerebras-gpt-6.7b": _gpt2(32, 4096, 32),
    "cerebras-gpt-13b": _gpt2(40, 5120, 40),
    "distilgpt2": {**_gpt2(6, 768, 12), "n_positions": 1024},
    "codegen-350m": _codegen(20, 1024, 16),
    "codegen-2b": _codegen(32, 2560, 32),
    "codegen-6b": _codegen(33, 4096, 16),
    "codegen-16b": _codegen(34, 6144, 24),
    "gpt-neo-125m": _neo(12, 768, 12),
    "gpt-neo-1.3b": _neo(24, 2048, 16),
    "gpt-neo-2.7b": _neo(32, 2560, 20),
    "starcoder-15b": _bigcode(40, 6144, 48, 8192, 49152),
    "santacoder": _bigcode(24, 2048, 16, 2048, 49280),
    "xglm-564m": _xglm(24, 1024, 4096),
    "xglm-1.7b": _xglm(24, 2048, 8192),
    "xglm-7.5b": {**_xglm(32, 4096, 16384), "attention_heads": 32},
    "redpajama-incite-3b": _neox(32, 2560, 50432),
    "redpajama-incite-7b": _neox(32, 4096, 50432),
    "command-r-35b": _gated("cohere", 40, 8192, (64, 64), 22528, 256000),
    "command-r-plus-104b": {**_gated("cohere", 64, 12288, (96, 8), 33792, 256000), "use_qk_norm": True},
    "aya-23-8b": _gated("cohere", 32, 4096, (32, 8), 14336, 256000),
    "granite-3-2b": {**_gated("granite", 40, 2048, (32, 8), 8192, 49155), "tie_word_embeddings": True},
    "granite-3-8b": {**_gated("granite", 40, 4096, (32, 8), 12800, 49155), "tie_word_embeddings": True},
    "ministral-8b": {**_gated("mistral", 36, 4096, (32, 8), 12288, 131072), "sliding_window": None},
    "codestral-22b": {**_gated("mistral", 56, 6144, (48, 8), 16384, 32768), "sliding_window": None},
    "solar-10.7b": _gated("llama", 48, 4096, (32, 8), 14336, 32000),
    "openllama-3b": _gated("llama", 26, 3200, (32, 32), 8640, 32000),
    "deepseek-coder-6.7b": _gated("llama", 32, 4096, (32, 32), 11008, 32256),
    "deepseek-coder-33b": _gated("llama", 62, 7168, (56, 8), 19200, 32256),
    "stablelm-2-1.6b": {**_gated("stablelm", 24, 2048, (32, 32), 5632, 100352), "use_qkv_bias": True},
    "internlm3-8b": {**_gated("internlm3", 48, 4096, (32, 2), 10240, 128512), "head_dim": 128},
    "phi-3.5-moe": {
        **_gated("phimoe", 32, 4096, (32, 8), 6400, 32064), "num_local_experts": 16, "num_experts_per_tok": 2,
        "attention_bias": True, "lm_head_bias": True,
    },
    "dots.llm1": {
        **_gated("dots1", 62, 4096, (32, 32), 10944, 152064), "head_dim": 128, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
    },
    "ernie-4.5-21b-a3b": {
        **_gated("ernie4_5_moe", 28, 2560, (20, 4), 12288, 103424), **_ERNIE, "moe_intermediate_size": 1536, "moe_k": 6,
    },
    "ernie-4.5-300b-a47b": {
        **_gated("ernie4_5_moe", 54, 8192, (64, 8), 28672, 103424), "moe_num_experts": 64, "moe_k": 8, "moe_intermediate_size": 3584,
        "moe_layer_start_index": 3, "moe_num_shared_experts": 0, "tie_word_embeddings": False,
    },
    "hunyuan-a13b": {
        **_gated("hunyuan_v1_moe", 32, 4096, (32, 8), 3072, 128167), "head_dim": 128, "num_experts": 64, "moe_topk": 8,
        "num_shared_expert": 1, "tie_word_embeddings": True,
    },
    # Of each two layers the second takes the first's keys and values (cla_share_factor): 0.07 % fewer parameters than these.
    "hunyuan-large": {
        **_gated("hunyuan", 64, 6400, (80, 8), 18304, 128512), "num_experts": 16, "moe_topk": 1, "num_shared_expert": 1,
        "tie_word_embeddings": True,
    },
    "granite-3-1b-a400m": _granite_moe(24, 1024, 16, 32),
    "granite-3-3b-a800m": _granite_moe(32, 1536, 24, 40),
    "ling-lite": {
        **_gated("bailing_moe", 28, 2048, (16, 4), 5632, 126464), "moe_intermediate_size": 1408, "num_experts": 64,
        "num_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 0,
    },
    "ling-mini-2.0": {
        **_gated("bailing_moe_v2", 20, 2048, (16, 4), 5120, 157184), "head_dim": 128, "moe_intermediate_size": 512, "use_qk_norm": True,
        "num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4,
    },
    "longcat-flash": {
        "model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6144, "num_attention_heads": 64, "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072,
    },
    "mimo-7b": {**_gated("mimo", 36, 4096, (32, 8), 11008, 151680), "tie_word_embeddings": False},
    "glm-4.7-flash": _GLM_4_7_FLASH,
    "apertus-8b": _gated("apertus", 32, 4096, (32, 8), 21504, 131072),
    "apertus-70b": _gated("apertus", 80, 8192, (64, 8), 43008, 131072),
    "aya-expanse-32b": _gated("cohere", 40, 8192, (64, 8), 24576, 256000),
    "command-r7b": {**_gated("cohere2", 32, 4096, (32, 8), 14336, 256000), "head_dim": 128},
    "command-a-111b": {**_gated("cohere2", 64, 12288, (96, 8), 36864, 256000), "head_dim": 128},
    "exaone-4.0-32b": _gated("exaone4", 64, 5120, (40, 8), 27392, 102400),
    "afm-4.5b": _gated("arcee", 36, 2560, (20, 4), 18432, 128004),
    "minimax-text-01": {
        **_gated("minimax", 80, 6144, (64, 8), 9216, 200064), "head_dim": 128, "num_local_experts": 32,
        "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    },
    "deepseek-v3.2": {**_DEEPSEEK_V3, "model_type": "deepseek_v32"},
    "glm-5": _GLM_5,
    "whisper-tiny": _whisper(4, 384),
    "whisper-base": _whisper(6, 512),
    "whisper-small": _whisper(12, 768),
    "whisper-medium": _whisper(24, 1024),
    "whisper-large-v2": _whisper(32, 1280),
    "whisper-large-v3": _whisper(32, 1280, vocab=51866, sounds=128),
    "pegasus-large": _stacks("pegasus", 16, 1024, 16, 4096, 96103, max_position_embeddings=1024),
    "m2m100-418m": _stacks("m2m_100", 12, 1024, 16, 4096, 128112),
    "m2m100-1.2b": _stacks("m2m_100", 24, 1024, 16, 8192, 128112),
    "nllb-200-600m": _stacks("m2m_100", 12, 1024, 16, 4096, 256206),
    "nllb-200-1.3b": _stacks("m2m_100", 24, 1024, 16, 8192, 256206),
    "nllb-200-3.3b": _stacks("m2m_100", 24, 2048, 16, 8192, 256206),
    "xlm-roberta-base": _encoder("xlm-roberta", 12, 768, 250002),
    "xlm-roberta-large": _encoder("xlm-roberta", 24, 1024, 250002),
    "xlm-roberta-xl": _encoder("xlm-roberta-xl", 36, 2560, 250880, num_attention_heads=32),
    "electra-base": _encoder("electra", 12, 768, 30522, 512, type_vocab_size=2, embedding_size=768),
    "electra-large": _encoder("electra", 24, 1024, 30522, 512, type_vocab_size=2, embedding_size=1024),
    "distilbert-base": {
        "model_type": "distilbert", "n_layers": 6, "dim": 768, "n_heads": 12, "hidden_dim": 3072, "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
}  # fmt: skip
CONFIG_FAMILY: tuple[Architecture, ...] = tuple(
    architecture_from_config(config, name) for name, config in _CONFIGS.items()
)
