"""Published models with two matrices in the feed-forward block, each family with the page that gives its shapes."""

from __future__ import annotations

import dataclasses

from memadvisor.architecture import Architecture, ReferenceCode


def _gpt(name: str, n_layers: int, hidden: int, n_heads: int, vocab: int, positions: int) -> Architecture:
    return Architecture(
        name=name,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=hidden // n_heads,
        ffn=4 * hidden,
        vocab=vocab,
        tied_embeddings=True,
        gated_mlp=False,
        positions=positions,
        biases=True,
        norm_vectors=2,
    )


def _gpt2(name: str, n_layers: int, hidden: int, n_heads: int) -> Architecture:
    code = ReferenceCode(
        activation_tensors=4,
        fp32_softmax=False,
        residual_dropout=True,
        score_dropout=True,
        fused_qkv=True,
    )
    return dataclasses.replace(_gpt(name, n_layers, hidden, n_heads, 50257, 1024), code=code)


def _opt(name: str, n_layers: int, hidden: int, n_heads: int) -> Architecture:
    code = ReferenceCode(activation_tensors=0, residual_dropout=True)
    return dataclasses.replace(_gpt(name, n_layers, hidden, n_heads, 50272, 2050), code=code)


def _galactica(name: str, n_layers: int, hidden: int, n_heads: int) -> Architecture:
    return dataclasses.replace(_opt(name, n_layers, hidden, n_heads), vocab=50000, biases=False)


def _bloom(name: str, n_layers: int, hidden: int, n_heads: int) -> Architecture:
    return dataclasses.replace(_gpt(name, n_layers, hidden, n_heads, 250880, 0), embedding_norm=True)


def _neox(name: str, n_layers: int, hidden: int, n_heads: int, vocab: int) -> Architecture:
    return dataclasses.replace(_gpt(name, n_layers, hidden, n_heads, vocab, 0), tied_embeddings=False)


def _mpt(name: str, n_layers: int, hidden: int, n_heads: int, vocab: int = 50432) -> Architecture:
    return dataclasses.replace(_gpt(name, n_layers, hidden, n_heads, vocab, 0), biases=False, norm_vectors=1)


def _falcon(name: str, n_layers: int, hidden: int, n_heads: int, n_kv_heads: int, norms: int) -> Architecture:
    return dataclasses.replace(
        _gpt(name, n_layers, hidden, n_heads, 65024, 0),
        n_kv_heads=n_kv_heads,
        biases=False,
        norms_per_layer=norms,
    )


def _phi(name: str, n_layers: int, hidden: int, n_heads: int) -> Architecture:
    return dataclasses.replace(
        _gpt(name, n_layers, hidden, n_heads, 51200, 0),
        tied_embeddings=False,
        norms_per_layer=1,
        head_bias=True,
    )


def _bert(name: str, n_layers: int, hidden: int, n_heads: int) -> Architecture:
    """With the head of a masked language model; its tables of kinds and its pooler are left out."""
    code = ReferenceCode(fp32_softmax=False, residual_dropout=True, score_dropout=True)
    plain = _gpt(name, n_layers, hidden, n_heads, 30522, 512)
    return dataclasses.replace(plain, causal=False, embedding_norm=True, final_norm=False, code=code)


def _modernbert(name: str, n_layers: int, hidden: int, n_heads: int, ffn: int) -> Architecture:
    """Rotary positions, no biases; its windows are taken to see all, as a config.json's are."""
    plain = _gpt(name, n_layers, hidden, n_heads, 50368, 0)
    return dataclasses.replace(
        plain, ffn=ffn, gated_mlp=True, biases=False, norm_vectors=1, causal=False, embedding_norm=True, final_norm=False, head_layer=True, head_bias=True
    )  # fmt: skip


def _esm2(name: str, n_layers: int, hidden: int, n_heads: int) -> Architecture:
    """Of proteins: 33 words, rotary positions, norms before attention, no dropout; what tells contacts from every head's weights."""
    plain = _gpt(name, n_layers, hidden, n_heads, 33, 0)
    code = ReferenceCode(activation_tensors=3, fp32_softmax=False)
    return dataclasses.replace(
        plain, causal=False, head_layer=True, head_bias=True, around=n_layers * n_heads + 1, code=code
    )


def _nemotron(name: str, n_layers: int, hidden: int, heads: tuple[int, int], ffn: int) -> Architecture:
    """`heads`: of queries, of keys and values. Squared ReLU, rotary positions, no biases."""
    plain = _gpt(name, n_layers, hidden, heads[0], 256000, 0)
    return dataclasses.replace(plain, n_kv_heads=heads[1], ffn=ffn, biases=False, tied_embeddings=False)


# https://huggingface.co/openai-community/gpt2 and its larger sisters, config.json.
_GPT2 = (
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
)
# arXiv:2005.14165, table 2.1. Of 1.3B the heads are those that fill its width (the table's 24 x 128 do not), and of 13B the
# width is that of its 40 heads of 128 (the table has 5140).
_GPT3 = (
    _gpt("gpt3-125m", 12, 768, 12, 50257, 2048),
    _gpt("gpt3-350m", 24, 1024, 16, 50257, 2048),
    _gpt("gpt3-760m", 24, 1536, 16, 50257, 2048),
    _gpt("gpt3-1.3b", 24, 2048, 16, 50257, 2048),
    _gpt("gpt3-2.7b", 32, 2560, 32, 50257, 2048),
    _gpt("gpt3-6.7b", 32, 4096, 32, 50257, 2048),
    _gpt("gpt3-13b", 40, 5120, 40, 50257, 2048),
    _gpt("gpt3-175b", 96, 12288, 96, 50257, 2048),
)
# arXiv:2104.04473, table 1; 22b and 530b also arXiv:2205.05198, table 3; 8.3b arXiv:1909.08053, table 3.
_MEGATRON = (
    _gpt("megatron-1.7b", 24, 2304, 24, 51200, 2048),
    _gpt("megatron-3.6b", 30, 3072, 32, 51200, 2048),
    _gpt("megatron-7.5b", 36, 4096, 32, 51200, 2048),
    _gpt("megatron-8.3b", 72, 3072, 32, 51200, 1024),
    _gpt("megatron-18.4b", 40, 6144, 48, 51200, 2048),
    _gpt("megatron-22b", 48, 6144, 64, 51200, 2048),
    _gpt("megatron-39.1b", 48, 8192, 64, 51200, 2048),
    _gpt("megatron-76.1b", 60, 10240, 80, 51200, 2048),
    _gpt("megatron-145.6b", 80, 12288, 96, 51200, 2048),
    _gpt("megatron-175b", 96, 12288, 96, 51200, 2048),
    _gpt("megatron-310.1b", 96, 16384, 128, 51200, 2048),
    _gpt("megatron-530b", 105, 20480, 128, 51200, 2048),
    _gpt("megatron-1t", 128, 25600, 160, 51200, 2048),
)
_OTHER = (
    # https://www.microsoft.com/en-us/research/blog/turing-nlg-a-17-billion-parameter-language-model-by-microsoft/
    _gpt("turing-nlg", 78, 4256, 28, 50257, 1024),
    # https://huggingface.co/EleutherAI/gpt-j-6b, config.json
    dataclasses.replace(
        _gpt("gpt-j-6b", 28, 4096, 16, 50400, 0),
        tied_embeddings=False,
        biases=False,
        mlp_biases=True,
        norms_per_layer=1,
        head_bias=True,
    ),
    # https://huggingface.co/bigcode/starcoder2-7b and -15b, config.json
    dataclasses.replace(
        _gpt("starcoder2-7b", 32, 4608, 36, 49152, 0), n_kv_heads=4, ffn=18432, tied_embeddings=True
    ),
    dataclasses.replace(
        _gpt("starcoder2-15b", 40, 6144, 48, 49152, 0), n_kv_heads=4, ffn=24576, tied_embeddings=False
    ),
)
# arXiv:2205.01068, table 1, and https://huggingface.co/facebook/opt-125m and its sisters (350m projects its embedding and
# is left out).
_OPT = (
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-2.7b", 32, 2560, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _opt("opt-175b", 96, 12288, 96),
)
# arXiv:2211.05100, table 3.
_BLOOM = (
    _bloom("bloom-560m", 24, 1024, 16),
    _bloom("bloom-1b1", 24, 1536, 16),
    _bloom("bloom-1b7", 24, 2048, 16),
    _bloom("bloom-3b", 30, 2560, 32),
    _bloom("bloom-7b1", 30, 4096, 32),
    _bloom("bloom-176b", 70, 14336, 112),
)
# arXiv:2304.01373, table 1; arXiv:2204.06745.
_NEOX = (
    _neox("pythia-70m", 6, 512, 8, 50304),
    _neox("pythia-160m", 12, 768, 12, 50304),
    _neox("pythia-410m", 24, 1024, 16, 50304),
    _neox("pythia-1b", 16, 2048, 8, 50304),
    _neox("pythia-1.4b", 24, 2048, 16, 50304),
    _neox("pythia-2.8b", 32, 2560, 32, 50304),
    _neox("pythia-6.9b", 32, 4096, 32, 50432),
    _neox("pythia-12b", 36, 5120, 40, 50688),
    _neox("gpt-neox-20b", 44, 6144, 64, 50432),
)
# https://huggingface.co/mosaicml/mpt-7b and mpt-30b, config.json.
_MPT = (
    _mpt("mpt-7b", 32, 4096, 32),
    _mpt("mpt-30b", 48, 7168, 64),
)
# arXiv:2311.16867; https://huggingface.co/tiiuae/falcon-7b and its sisters, config.json.
_FALCON = (
    _falcon("falcon-7b", 32, 4544, 71, 1, 1),
    _falcon("falcon-40b", 60, 8192, 128, 8, 2),
    # arXiv:2211.09085, table 1.
    _galactica("galactica-6.7b", 32, 4096, 32),
    _galactica("galactica-30b", 48, 7168, 56),
    _galactica("galactica-120b", 96, 10240, 80),
    _falcon("falcon-180b", 80, 14848, 232, 8, 2),
)
# https://huggingface.co/microsoft/phi-1_5 and phi-2, config.json.
_PHI = (
    _phi("phi-1.5", 24, 2048, 32),
    _phi("phi-2", 32, 2560, 32),
)

# arXiv:1810.04805, section 3; RoBERTa: https://huggingface.co/FacebookAI/roberta-large, config.json.
_BERT = (
    _bert("bert-base", 12, 768, 12),
    _bert("bert-large", 24, 1024, 16),
    dataclasses.replace(_bert("roberta-base", 12, 768, 12), vocab=50265, positions=514),
    dataclasses.replace(_bert("roberta-large", 24, 1024, 16), vocab=50265, positions=514),
    # arXiv:2412.13663, table 4: gated, windows of 128 tokens, every third layer without one.
    _modernbert("modernbert-base", 22, 768, 12, 1152),
    _modernbert("modernbert-large", 28, 1024, 16, 2624),
)
# https://huggingface.co/facebook/esm2_t33_650M_UR50D and its sisters, config.json.
_ESM2 = (
    _esm2("esm2-8m", 6, 320, 20),
    _esm2("esm2-35m", 12, 480, 20),
    _esm2("esm2-150m", 30, 640, 20),
    _esm2("esm2-650m", 33, 1280, 20),
    _esm2("esm2-3b", 36, 2560, 40),
    _esm2("esm2-15b", 48, 5120, 40),
)
# arXiv:2402.16819, table 1; arXiv:2406.11704, table 1; the others: https://github.com/NVIDIA/NeMo,
# nemo/collections/llm/gpt/model/nemotron.py
_NEMOTRON = (
    _nemotron("nemotron-4b", 32, 3072, (24, 8), 9216),
    _nemotron("nemotron-8b", 32, 4096, (32, 32), 16384),
    _nemotron("nemotron-15b", 32, 6144, (48, 8), 24576),
    _nemotron("nemotron-22b", 40, 6144, (48, 48), 24576),
    _nemotron("nemotron-340b", 96, 18432, (96, 8), 73728),
)

GPT_FAMILY: tuple[Architecture, ...] = (
    *_GPT2, *_GPT3, *_MEGATRON, *_OTHER, *_OPT, *_BLOOM, *_NEOX, *_MPT, *_FALCON, *_PHI, *_BERT, *_ESM2, *_NEMOTRON,
)  # fmt: skip
