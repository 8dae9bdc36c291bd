"""Published models with a gated feed-forward block, each family with the page that gives its shapes."""

from __future__ import annotations

from typing import Any

from memadvisor.architecture import Architecture, Experts, LatentAttention


def _llama(
    name: str,
    n_layers: int,
    hidden: int,
    heads: tuple[int, int],
    ffn: int,
    vocab: int,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    **more: Any,
) -> Architecture:
    """`heads`: of queries, of keys and values."""
    return Architecture(
        name=name,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        head_dim=hidden // heads[0] if head_dim is None else head_dim,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=tied,
        gated_mlp=True,
        **more,
    )


def _qwen3(
    name: str, n_layers: int, hidden: int, heads: tuple[int, int], ffn: int, tied: bool, **more: Any
) -> Architecture:
    return _llama(name, n_layers, hidden, heads, ffn, 151936, head_dim=128, tied=tied, qk_norm=256, **more)


_TOWER = "the vision tower"


def _gemma3(name: str, n_layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocab: int, head_dim: int, left_out: str = _TOWER) -> Architecture:  # fmt: skip
    return _llama(
        name,
        n_layers,
        hidden,
        heads,
        ffn,
        vocab,
        head_dim=head_dim,
        tied=True,
        norms_per_layer=4,
        qk_norm=2 * head_dim,
        left_out=left_out,
        window=512
        if n_layers == 26
        else 1024,  # arXiv:2503.19786, section 2: five such layers to one that sees all
        full_every=6,
    )


def _deepseek(name: str, n_layers: int, hidden: int, heads: int, ffn: int, vocab: int, q_rank: int | None, experts: Experts) -> Architecture:  # fmt: skip
    latent = LatentAttention(
        kv_rank=512, q_rank=q_rank, rope_head_dim=64, nope_head_dim=128, value_head_dim=128
    )
    return _llama(
        name, n_layers, hidden, (heads, heads), ffn, vocab, head_dim=192, latent=latent, experts=experts
    )


def _sparse(num: int, per_token: int, ffn: int, shared: int = 0, first_dense: int = 0, gate: bool = False, groups: tuple[int, int] = (1, 1), every: int = 1) -> Experts:  # fmt: skip
    return Experts(
        num_experts=num,
        experts_per_token=per_token,
        expert_ffn=ffn,
        shared_ffn=shared,
        first_dense=first_dense,
        every=every,
        shared_gate=gate,
        groups=groups[0],
        groups_per_token=groups[1],
    )


def _gpt_oss(name: str, n_layers: int, num_experts: int) -> Architecture:
    experts = Experts(num_experts=num_experts, experts_per_token=4, expert_ffn=2880, router_bias=True)
    return _llama(name, n_layers, 2880, (64, 8), 2880, 201088, head_dim=64, biases=True, attention_sinks=True, experts=experts, window=128, full_every=2)  # fmt: skip


# arXiv:2302.13971, table 2.
_LLAMA1 = (
    _llama("llama-7b", 32, 4096, (32, 32), 11008, 32000),
    _llama("llama-13b", 40, 5120, (40, 40), 13824, 32000),
    _llama("llama-33b", 60, 6656, (52, 52), 17920, 32000),
    _llama("llama-65b", 80, 8192, (64, 64), 22016, 32000),
)
# arXiv:2307.09288, table 1, and Code Llama, arXiv:2308.12950.
_LLAMA2 = (
    _llama("llama2-7b", 32, 4096, (32, 32), 11008, 32000),
    _llama("llama2-13b", 40, 5120, (40, 40), 13824, 32000),
    _llama("llama2-34b", 48, 8192, (64, 8), 22016, 32000),
    _llama("llama2-70b", 80, 8192, (64, 8), 28672, 32000),
    _llama("tinyllama-1.1b", 22, 2048, (32, 4), 5632, 32000),  # arXiv:2401.02385
)
# arXiv:2407.21783, table 3; https://huggingface.co/meta-llama/Llama-3.2-1B and -3B, config.json.
_LLAMA3 = (
    _llama("llama3.2-1b", 16, 2048, (32, 8), 8192, 128256, tied=True),
    _llama("llama3.2-3b", 28, 3072, (24, 8), 8192, 128256, tied=True),
    _llama("llama3-8b", 32, 4096, (32, 8), 14336, 128256),
    _llama("llama3-70b", 80, 8192, (64, 8), 28672, 128256),
    _llama("llama3-405b", 126, 16384, (128, 8), 53248, 128256),
)
# arXiv:2310.06825, table 1; arXiv:2401.04088, table 1; https://huggingface.co/mistralai, config.json of each.
_MISTRAL = (
    _llama("mistral-7b", 32, 4096, (32, 8), 14336, 32000),
    _llama("mistral-nemo-12b", 40, 5120, (32, 8), 14336, 131072, head_dim=128),
    _llama("mistral-small-24b", 40, 5120, (32, 8), 32768, 131072, head_dim=128),
    _llama("mistral-large-123b", 88, 12288, (96, 8), 28672, 32768),
    _llama("mixtral-8x7b", 32, 4096, (32, 8), 14336, 32000, experts=_sparse(8, 2, 14336)),
    _llama("mixtral-8x22b", 56, 6144, (48, 8), 16384, 32000, experts=_sparse(8, 2, 16384)),
    # https://huggingface.co/databricks/dbrx-base, config.json; https://github.com/xai-org/grok-1, run.py;
    # https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E, config.json (their language models)
    _llama("dbrx", 40, 6144, (48, 8), 10752, 100352, experts=_sparse(16, 4, 10752)),
    _llama("grok-1", 64, 6144, (48, 8), 32768, 131072, tied=True, experts=_sparse(8, 2, 32768)),
    _llama("llama4-scout", 48, 5120, (40, 8), 16384, 202048, experts=_sparse(16, 1, 8192, 8192), left_out=_TOWER),
    _llama("llama4-maverick", 48, 5120, (40, 8), 16384, 202048, experts=_sparse(128, 1, 8192, 8192, first_dense=1, every=2), left_out=_TOWER),
)  # fmt: skip
# arXiv:2407.10671, table 1; arXiv:2412.15115, table 1; https://huggingface.co/Qwen, config.json of each.
_QWEN2 = (
    _llama("qwen2-0.5b", 24, 896, (14, 2), 4864, 151936, tied=True, qkv_biases=True),
    _llama("qwen2-1.5b", 28, 1536, (12, 2), 8960, 151936, tied=True, qkv_biases=True),
    _llama("qwen2-7b", 28, 3584, (28, 4), 18944, 152064, qkv_biases=True),
    _llama("qwen2-72b", 80, 8192, (64, 8), 29568, 152064, qkv_biases=True),
    _llama("qwen2-57b-a14b", 28, 3584, (28, 4), 18944, 151936, qkv_biases=True, experts=_sparse(64, 8, 2560, 20480, gate=True)),
    _llama("qwen1.5-moe-a2.7b", 24, 2048, (16, 16), 5632, 151936, qkv_biases=True, experts=_sparse(60, 4, 1408, 5632, gate=True)),
    _llama("qwen-7b", 32, 4096, (32, 32), 11008, 151936, qkv_biases=True),
    _llama("qwen-14b", 40, 5120, (40, 40), 13696, 152064, qkv_biases=True),
    _llama("qwen-72b", 80, 8192, (64, 64), 24576, 152064, qkv_biases=True),
    _llama("qwen1.5-7b", 32, 4096, (32, 32), 11008, 151936, qkv_biases=True),
    _llama("qwen1.5-14b", 40, 5120, (40, 40), 13696, 152064, qkv_biases=True),
    _llama("qwen1.5-32b", 64, 5120, (40, 8), 27392, 152064, qkv_biases=True),
    _llama("qwen1.5-72b", 80, 8192, (64, 64), 24576, 152064, qkv_biases=True),
    _llama("qwen1.5-110b", 80, 8192, (64, 8), 49152, 152064, qkv_biases=True),
    _llama("qwen2.5-0.5b", 24, 896, (14, 2), 4864, 151936, tied=True, qkv_biases=True),
    _llama("qwen2.5-1.5b", 28, 1536, (12, 2), 8960, 151936, tied=True, qkv_biases=True),
    _llama("qwen2.5-3b", 36, 2048, (16, 2), 11008, 151936, tied=True, qkv_biases=True),
    _llama("qwen2.5-7b", 28, 3584, (28, 4), 18944, 152064, qkv_biases=True),
    _llama("qwen2.5-14b", 48, 5120, (40, 8), 13824, 152064, qkv_biases=True),
    _llama("qwen2.5-32b", 64, 5120, (40, 8), 27648, 152064, qkv_biases=True),
    _llama("qwen2.5-72b", 80, 8192, (64, 8), 29568, 152064, qkv_biases=True),
)  # fmt: skip
# arXiv:2505.09388, tables 1 and 2; https://huggingface.co/Qwen, config.json of each.
_QWEN3 = (
    _qwen3("qwen3-0.6b", 28, 1024, (16, 8), 3072, True),
    _qwen3("qwen3-1.7b", 28, 2048, (16, 8), 6144, True),
    _qwen3("qwen3-4b", 36, 2560, (32, 8), 9728, True),
    _qwen3("qwen3-8b", 36, 4096, (32, 8), 12288, False),
    _qwen3("qwen3-14b", 40, 5120, (40, 8), 17408, False),
    _qwen3("qwen3-32b", 64, 5120, (64, 8), 25600, False),
    _qwen3("qwen3-30b-a3b", 48, 2048, (32, 4), 6144, False, experts=_sparse(128, 8, 768)),
    # https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct, config.json.
    _qwen3("qwen3-coder-480b-a35b", 62, 6144, (96, 8), 8192, False, experts=_sparse(160, 8, 2560)),
    _qwen3("qwen3-235b-a22b", 94, 4096, (64, 4), 12288, False, experts=_sparse(128, 8, 1536)),
)
# arXiv:2403.08295, table 1; arXiv:2408.00118, table 1; arXiv:2503.19786, table 1 (the language models alone).
_GEMMA = (
    _llama("gemma-2b", 18, 2048, (8, 1), 16384, 256000, head_dim=256, tied=True),
    _llama("gemma-7b", 28, 3072, (16, 16), 24576, 256000, head_dim=256, tied=True),
    _llama(
        "gemma2-2b",
        26,
        2304,
        (8, 4),
        9216,
        256000,
        head_dim=256,
        tied=True,
        norms_per_layer=4,
        window=4096,
        full_every=2,
    ),
    _llama(
        "gemma2-9b",
        42,
        3584,
        (16, 8),
        14336,
        256000,
        head_dim=256,
        tied=True,
        norms_per_layer=4,
        window=4096,
        full_every=2,
    ),
    _llama(
        "gemma2-27b",
        46,
        4608,
        (32, 16),
        36864,
        256000,
        head_dim=128,
        tied=True,
        norms_per_layer=4,
        window=4096,
        full_every=2,
    ),
    _gemma3("gemma3-1b", 26, 1152, (4, 1), 6912, 262144, 256, left_out=""),
    _gemma3("gemma3-4b", 34, 2560, (8, 4), 10240, 262208, 256),
    _gemma3("gemma3-12b", 48, 3840, (16, 8), 15360, 262208, 256),
    _gemma3("gemma3-27b", 62, 5376, (32, 16), 21504, 262208, 128),
)
# arXiv:2405.04434, section 3.1 and appendix B; arXiv:2412.19437, section 4.2 (without its layer that predicts two ahead).
_DEEPSEEK = (
    _llama("deepseek-llm-7b", 30, 4096, (32, 32), 11008, 102400),
    _llama("deepseek-llm-67b", 95, 8192, (64, 8), 22016, 102400),
    _deepseek("deepseek-v2-lite", 27, 2048, 16, 10944, 102400, None, _sparse(64, 6, 1408, 2816, 1)),
    _deepseek(
        "deepseek-v2", 60, 5120, 128, 12288, 102400, 1536, _sparse(160, 6, 1536, 3072, 1, groups=(8, 3))
    ),
    _deepseek(
        "deepseek-v3", 61, 7168, 128, 18432, 129280, 1536, _sparse(256, 8, 2048, 2048, 3, groups=(8, 4))
    ),
    # arXiv:2507.20534, table 3
    _deepseek("kimi-k2", 61, 7168, 64, 18432, 163840, 1536, _sparse(384, 8, 2048, 2048, 1)),
    # By github.com/THUDM/slime, scripts/models/moonlight.sh.
    _deepseek("moonlight-16b-a3b", 27, 2048, 16, 11264, 163840, None, _sparse(64, 6, 1408, 2816, 1)),
)
# https://huggingface.co/openai/gpt-oss-120b and -20b, config.json. Every second layer sees 128 tokens alone.
_GPT_OSS = (
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
)
# arXiv:2508.06471, table 1, and https://huggingface.co/zai-org/GLM-4.5, config.json; without the layer that predicts two ahead.
_GLM = (
    _llama("glm-4.5", 92, 5120, (96, 8), 12288, 151552, head_dim=128, qkv_biases=True, qk_norm=256, experts=_sparse(160, 8, 1536, 1536, 3)),
    _llama("glm-4.5-air", 46, 4096, (96, 8), 10944, 151552, head_dim=128, qkv_biases=True, experts=_sparse(128, 8, 1408, 1408, 1)),
)  # fmt: skip
_OTHER = (
    # https://huggingface.co/MiniMaxAI/MiniMax-M2 and https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base, config.json.
    _llama(
        "minimax-m2",
        62,
        3072,
        (48, 8),
        1536,
        200064,
        head_dim=128,
        qk_norm=7168,
        experts=_sparse(256, 8, 1536),
    ),
    _llama("seed-oss-36b", 64, 5120, (80, 8), 27648, 155136, head_dim=128, qkv_biases=True),
    # https://huggingface.co/HuggingFaceTB, config.json of each.
    _llama("smollm-135m", 30, 576, (9, 3), 1536, 49152, tied=True),
    _llama("smollm-360m", 32, 960, (15, 5), 2560, 49152, tied=True),
    _llama("smollm-1.7b", 24, 2048, (32, 32), 8192, 49152, tied=True),
    _llama("smollm3-3b", 36, 2048, (16, 4), 11008, 128256, tied=True),
    # arXiv:2404.14219, section 2; https://huggingface.co/microsoft/phi-4, config.json.
    _llama("phi-3-mini", 32, 3072, (32, 32), 8192, 32064),
    _llama("phi-3-medium", 40, 5120, (40, 10), 17920, 32064),
    _llama("phi-4", 40, 5120, (40, 10), 17920, 100352),
    # By github.com/Lightning-AI/litgpt, litgpt/config.py.
    _llama("phi-4-mini", 32, 3072, (24, 8), 8192, 200064, tied=True),
    _llama("stablelm-3b", 32, 2560, (32, 32), 6912, 50304, norm_vectors=2),
    # arXiv:2403.04652, table 1.
    _llama("yi-6b", 32, 4096, (32, 4), 11008, 64000),
    _llama("yi-34b", 60, 7168, (56, 8), 20480, 64000),
    # https://huggingface.co/internlm, /baichuan-inc, /THUDM and /allenai, config.json of each.
    _llama("internlm-7b", 32, 4096, (32, 32), 11008, 103168, qkv_biases=True, output_bias=True),
    _llama("internlm-20b", 60, 5120, (40, 40), 13824, 103168),
    _llama("internlm2-7b", 32, 4096, (32, 8), 14336, 92544),
    _llama("internlm2-20b", 48, 6144, (48, 8), 16384, 92544),
    _llama("baichuan-7b", 32, 4096, (32, 32), 11008, 64000),
    _llama("baichuan-13b", 40, 5120, (40, 40), 13696, 64000),
    _llama("baichuan2-7b", 32, 4096, (32, 32), 11008, 125696),
    _llama("baichuan2-13b", 40, 5120, (40, 40), 13696, 125696),
    _llama("chatglm2-6b", 28, 4096, (32, 2), 13696, 65024, qkv_biases=True),
    _llama("chatglm3-6b", 28, 4096, (32, 2), 13696, 65024, qkv_biases=True),
    _llama("glm-4-9b", 40, 4096, (32, 2), 13696, 151552, qkv_biases=True),
    _llama("olmo-1b", 16, 2048, (16, 16), 8192, 50304, tied=True),
    _llama("olmo-7b", 32, 4096, (32, 32), 11008, 50304),
    # arXiv:2501.00656, table 3: norms over all queries and all keys.
    _llama("olmo2-7b", 32, 4096, (32, 32), 11008, 100352, qk_norm=8192),
    _llama("olmo2-13b", 40, 5120, (40, 40), 13824, 100352, qk_norm=10240),
    _llama("olmo2-32b", 64, 5120, (40, 8), 27648, 100352, qk_norm=6144),
    # https://huggingface.co/allenai/Olmo-3-1025-7B and Olmo-3-1125-32B, config.json: three layers in four see 4,096 tokens.
    _llama("olmo3-7b", 32, 4096, (32, 32), 11008, 100278, qk_norm=8192, window=4096, full_every=4),
    _llama("olmo3-32b", 64, 5120, (40, 8), 27648, 100278, qk_norm=6144, window=4096, full_every=4),
    # arXiv:2409.02060; transformers' OlmoeConfig, with experts of 1024.
    _llama("olmoe-1b-7b", 16, 2048, (16, 16), 1024, 50304, qk_norm=4096, experts=_sparse(64, 8, 1024)),
    # https://github.com/yandex/YaLM-100B, examples/generate_interactive.sh: its table of tokens is 2,048 wide, here as all else.
    _llama("yalm-100b", 80, 10240, (128, 128), 27308, 128000, tied=True),
    # arXiv:2310.19341; https://huggingface.co/xverse/XVERSE-65B and OrionStarAI/Orion-14B-Base, config.json.
    _llama("skywork-13b", 52, 4608, (36, 36), 12288, 65519),
    _llama("xverse-65b", 80, 8192, (64, 64), 22016, 100534),
    _llama("orion-14b", 40, 5120, (40, 40), 15360, 84608),
    # arXiv:2204.02311, table 1 (one head of keys and values), and arXiv:2201.08239, table 7.
    _llama("palm-8b", 32, 4096, (16, 1), 16384, 256000, head_dim=256, tied=True),
    _llama("palm-62b", 64, 8192, (32, 1), 32768, 256000, head_dim=256, tied=True),
    _llama("palm-540b", 118, 18432, (48, 1), 73728, 256000, head_dim=256, tied=True),
    _llama("lamda-137b", 64, 8192, (128, 128), 65536, 32000, head_dim=128, tied=True),
    # arXiv:2210.02414, table 11.
    _llama("glm-130b", 70, 12288, (96, 96), 32768, 150528, tied=True, biases=True, norm_vectors=2),
    # https://huggingface.co/tiiuae/Falcon3-7B-Base, config.json.
    _llama("falcon3-7b", 28, 3072, (12, 4), 23040, 131072, head_dim=256),
)

LLAMA_FAMILY: tuple[Architecture, ...] = (
    *_LLAMA1, *_LLAMA2, *_LLAMA3, *_MISTRAL, *_QWEN2, *_QWEN3, *_GEMMA, *_DEEPSEEK, *_GPT_OSS, *_GLM, *_OTHER,
)  # fmt: skip
