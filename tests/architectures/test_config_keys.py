"""Keys of a config.json that change how many parameters there are, each as transformers 5.24 builds the model from it."""

import pytest

from memadvisor.architectures.hugging_face import architecture_from_config
from memadvisor.errors import UsageError
from tests.architectures.small_configs import KIMI_LAYERS, MORE, TINY, VIT

COUNTED = [
    ("cohere", {"use_qk_norm": True, "tie_word_embeddings": False}, 126592),
    ("cwm", {"mlp_bias": True}, 373024),
    ("gemma", {"attention_bias": True}, 117808),
    ("gpt_bigcode", {"multi_query": False}, 102544),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}, 100480),
    ("qwen2_moe", {"qkv_bias": False}, 128896),
    ("deepseek_v3", {"attention_bias": True}, 115848),
    ("solar_open", {"attention_bias": True}, 129136),
    ("mamba", {"intermediate_size": 80}, 67600),
    ("glm4_moe", {"head_dim": None}, 111936),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "dense", "sparse"]}, 113720),
    ("afmoe", {}, 155096),
    ("exaone_moe", {}, 117792),
    ("granite_swa", {}, 107980),
    ("hy_v3", {}, 127056),
    ("mellum", {}, 115024),
    ("minicpm3", {}, 105784),
    ("nanochat", {}, 92160),
    ("vaultgemma", {}, 117184),
    ("youtu", {}, 105784),
    ("kimi_linear", {}, 214724),
    ("kimi_linear", KIMI_LAYERS, 208776),
    ("minimax", {}, 316672),
    ("modernbert", {}, 124512),
    ("bert", {}, 137776),
    ("nomic_bert", {}, 125216),
    ("bitnet", {}, 114640),
    ("xglm", {}, 100496),
    ("dbrx", {}, 308416),
    ("aria_text", {}, 437440),
    ("sarvam_moe", {}, 127056),
    ("glm_moe_dsa", {}, 120000),
    ("umt5", {}, 276032),
    ("whisper", {}, 243568),
    ("m2m_100", {}, 213744),
    ("marian", {}, 217584),
    ("eurobert", {}, 126400),
    ("lfm2_moe", {}, 113760),
    ("vit", {}, 156370),
    ("dinov2", {}, 212674),
    ("dinov2_with_registers", {}, 212930),
    ("esm", {}, 170557),
    ("layoutlm", {}, 404080),
    ("modernbert-decoder", {}, 124512),
    ("deit", {}, 156498),
    ("ijepa", {}, 156242),
    ("vit_msn", {}, 156370),
    ("audio-spectrogram-transformer", {}, 188882),
]


@pytest.mark.parametrize(("kind", "more", "parameters"), COUNTED)
def test_parameters_follow_each_key(kind, more, parameters):
    config = {**TINY, **MORE.get(kind, {}), **more, "model_type": kind}
    found = architecture_from_config({key: value for key, value in config.items() if value is not None}, "x")

    assert found.num_parameters() == parameters


@pytest.mark.parametrize(
    ("kind", "heads", "fields", "expected"),
    [
        ("gemma2", 8, {}, (256, 4)),
        ("mistral", 32, {}, (2, 8)),
        ("mistral", 4, {}, (16, 4)),
        ("qwen3", 8, {"num_key_value_heads": 2, "head_dim": 24}, (24, 2)),
    ],
)
def test_what_a_file_leaves_out_is_what_the_class_takes(kind, heads, fields, expected):
    """Width of a head, and heads of keys and values where they divide the heads: a file by hand may say neither."""
    found = architecture_from_config(
        {**TINY, "num_attention_heads": heads, **fields, "model_type": kind}, "x"
    )

    assert (found.head_dim, found.n_kv_heads) == expected


@pytest.mark.parametrize(
    ("kind", "more"),
    [("bart", {"tie_word_embeddings": False}), ("ernie4_5_moe", {"use_bias": True}), ("deepseek_v2", {"mlp_bias": True})],
)  # fmt: skip
def test_what_would_be_counted_wrongly_is_refused(kind, more):
    with pytest.raises(UsageError, match="not known"):
        architecture_from_config({**TINY, **MORE[kind], **more, "model_type": kind}, "x")


def test_minimax_has_as_many_parameters_as_it_states():
    """MiniMax-Text-01 (arXiv:2501.08313): 456 billion, of which a token meets 45.9 behind the embedding and before the head; each eighth layer attends."""
    config = {
        "model_type": "minimax_text_01", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128,
        "num_key_value_heads": 8, "intermediate_size": 9216, "num_local_experts": 32, "num_experts_per_tok": 2, "vocab_size": 200064,
        "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    }  # fmt: skip
    found = architecture_from_config(config, "x")

    assert found.num_parameters() == pytest.approx(456e9, rel=2e-3)
    assert found.active_parameters() - 2 * 200064 * 6144 == pytest.approx(45.9e9, rel=2e-3)
    assert found.layer_pattern == "rrrrrrra"


@pytest.mark.parametrize(
    ("kind", "vision", "more", "around"),
    [
        ("llava", "clip", {}, 8512),
        ("llava_next", "clip", {}, 8576),
        ("vipllava", "clip", {"vision_feature_layers": [-2, -1, 0]}, 12800),
    ],
)
def test_what_leads_into_the_language_model_is_counted(kind, vision, more, around):
    """Patches of 48 x 32, a token and 16 patches' positions, two norms; two products: 32 columns (of three layers 96, under a
    norm) to 64 to 64; a vector behind a row of LLaVA-NeXT's."""
    config = {
        "model_type": kind,
        "text_config": {"model_type": "llama", **TINY},
        "vision_config": {"model_type": f"{vision}_vision_model", **VIT},
        **more,
    }
    found = architecture_from_config(config, "x")

    assert found.tower is not None and found.tower.around == around
