"""What is read from a config.json has as many parameters as the model that transformers builds from it."""

import json
import re
from pathlib import Path

import pytest

from memadvisor.architectures.config_encoders import ENCODER_READERS
from memadvisor.architectures.config_images import TEXT_DEFAULTS, TOWERS
from memadvisor.architectures.encoder_decoders import ENCODER_DECODER_READERS
from memadvisor.architectures.hugging_face import _ALIKE, _READERS, architecture_from_config
from memadvisor.errors import UsageError

_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 112,
}
_GROUPED = {"num_key_value_heads": 2}
_WIDE_HEADS = {"num_key_value_heads": 1, "head_dim": 24}
_SPARSE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
           "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **_SPARSE}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 5,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2}
_STACKS = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 64, "max_position_embeddings": 32,
           **{f"{stack}_{key}": size for stack in ("encoder", "decoder") for key, size in (("attention_heads", 4), ("ffn_dim", 112))}}  # fmt: skip
_MORE = {
    "llama": {**_GROUPED, "attention_bias": True, "mlp_bias": True},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "qwen2": _GROUPED,
    "qwen2_moe": {**_GROUPED, "num_experts": 4, "shared_expert_intermediate_size": 40, **_SPARSE},
    "qwen3": _WIDE_HEADS,
    "qwen3_moe": {**_WIDE_HEADS, "num_experts": 4, **_SPARSE},
    "gemma": _WIDE_HEADS,
    "gemma2": _WIDE_HEADS,
    "gemma3_text": _WIDE_HEADS,
    "olmo2": _GROUPED,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24, "n_shared_experts": 1},
    "apertus": _GROUPED,
    "arcee": {**_GROUPED, "attention_bias": True, "mlp_bias": True},
    "biogpt": {"max_position_embeddings": 32},
    "codegen": {"n_inner": 112},
    "cohere2": _GROUPED,
    "cwm": _GROUPED,
    "dots1": {
        **_WIDE_HEADS,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        **_SPARSE,
    },
    "ernie4_5": {**_WIDE_HEADS, "use_bias": True},
    "ernie4_5_moe": {**_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone4": _GROUPED,
    "flex_olmo": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "glm": _WIDE_HEADS,
    "glm4": _WIDE_HEADS,
    "glm4_moe": {
        **_WIDE_HEADS,
        "n_routed_experts": 4,
        "use_qk_norm": True,
        "attention_bias": True,
        **_SPARSE,
    },
    "gpt_neo": {
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local", "global"], 1]],
        "max_position_embeddings": 32,
    },
    "gpt_oss": {**_WIDE_HEADS, "num_local_experts": 4},
    "granitemoe": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        **_GROUPED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
    },
    "hunyuan_v1_dense": _WIDE_HEADS,
    "hunyuan_v1_moe": {**_WIDE_HEADS, "num_experts": 4, "moe_topk": 2},
    "hyperclovax": _GROUPED,
    "jais2": _GROUPED,
    "llama4_text": {**_WIDE_HEADS, "intermediate_size_mlp": 48, "num_local_experts": 4},
    "ministral": _WIDE_HEADS,
    "ministral3": _WIDE_HEADS,
    "minimax_m2": {**_WIDE_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {**_GROUPED, "head_dim": 24},
    "olmo3": _GROUPED,
    "phimoe": {**_GROUPED, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    "qwen3_next": {
        **_WIDE_HEADS,
        **_DELTA,
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        **_SPARSE,
    },
    "qwen3_5_text": {**_WIDE_HEADS, **_DELTA},
    "qwen3_5_moe_text": {
        **_WIDE_HEADS,
        **_DELTA,
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        **_SPARSE,
    },
    "olmo_hybrid": {**_GROUPED, "num_hidden_layers": 4},
    "bamba": {**_GROUPED, **_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_GROUPED,
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
    },
    "falcon_h1": {**_GROUPED, **_MAMBA2, "mamba_d_ssm": 48},
    "nemotron_h": {
        **_GROUPED,
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "ssm_state_size": 8,
        "n_groups": 2,
        "head_dim": 16,
    },
    "jamba": {
        **_GROUPED,
        "num_experts": 4,
        "mamba_d_state": 8,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
    },
    "mamba": {"num_attention_heads": None, "intermediate_size": None},
    "falcon_mamba": {"num_attention_heads": None, "intermediate_size": None},
    "mamba2": {
        "num_attention_heads": None,
        "intermediate_size": None,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
    },
    "seed_oss": {**_WIDE_HEADS, "attention_out_bias": True},
    "solar_open": {**_WIDE_HEADS, "n_routed_experts": 4, **_SPARSE},
    "distilbert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 112},
    "openai-gpt": {"n_positions": 32, "intermediate_size": None},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "intermediate_size": None},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "opt": {"ffn_dim": 112, "word_embed_proj_dim": 64, "max_position_embeddings": 32},
    "gpt2": {"n_inner": 112, "n_positions": 32},
    "gpt_bigcode": {"n_inner": 112, "n_positions": 32},
    "gptj": {"n_inner": 112},
    "starcoder2": _GROUPED,
    "stablelm": {"use_qkv_bias": True},
    "bloom": {"intermediate_size": None},
    "t5": {"d_model": 64, "d_kv": 24, "d_ff": 112, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3},
    "mt5": {"d_model": 64, "d_kv": 16, "d_ff": 112, "num_heads": 4, "num_layers": 2},
    "bart": _STACKS,
    "mbart": _STACKS,
    "blenderbot": _STACKS,
}
# What their readers say that they leave out.
_LEFT_OUT = {
    "apertus": ("act_fn",),
    **dict.fromkeys(
        ENCODER_READERS,
        ("token_type_embeddings", "vocab_transform", "predictions.transform", "predictions.bias", "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "vocab_layer_norm", "vocab_projector.bias"),
    ),
}  # fmt: skip


# Of one type, what config.json may say besides.
_VARIANTS = [
    ("llama4_text", {"interleave_moe_layer_step": 2}),
    ("llama4_text", {"moe_layers": [1]}),
    ("llama4_text", {"moe_layers": []}),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
    ("qwen3_next", {"decoder_sparse_step": 2, "full_attention_interval": 3}),
    ("bamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "attn_layer_indices": None}),
    ("granitemoehybrid", {"num_local_experts": 0}),
    ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True, "mamba_d_ssm": None}),
    (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "n_routed_experts": 4,
            "use_bias": True,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        },
    ),
    ("jamba", {"num_experts": 1, "mamba_proj_bias": True}),
    ("mamba", {"use_bias": True, "use_conv_bias": False, "time_step_rank": 6, "tie_word_embeddings": False}),
    ("mamba2", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 3}),
]


@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in _READERS), *_VARIANTS])
def test_parameters_are_those_of_the_model(kind, more):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    fields = {
        **_TINY,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **_MORE.get(kind, {}),
        **more,
    }
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if v is not None})
    auto = transformers.AutoModelForCausalLM
    if kind in ENCODER_DECODER_READERS:
        auto = transformers.AutoModelForSeq2SeqLM
    elif kind in ENCODER_READERS:
        auto = transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    counted = {
        id(each): each.numel()
        for name, each in model.named_parameters()
        if not any(part in name for part in _LEFT_OUT.get(kind, ()))
    }
    expected = sum(counted.values())

    assert architecture_from_config(json.loads(config.to_json_string()), kind).num_parameters() == expected


_VIT = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 16,
}
_QWEN_VIT = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 64,
}
_IMAGES = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_TINY},
        "vision_config": {"model_type": "siglip_vision_model", **_VIT, "vision_use_head": False},
        "mm_tokens_per_image": 4,
    },
    "llava": {
        "text_config": {"model_type": "llama", **_TINY},
        "vision_config": {"model_type": "clip_vision_model", **_VIT},
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", **_TINY, **_WIDE_HEADS},
        "vision_config": {"model_type": "siglip_vision_model", **_VIT},
        "projection_dim": 64,
    },
    "qwen2_vl": {
        "text_config": {**_TINY, **_GROUPED},
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "patch_size": 4, "hidden_size": 64},
    },
    "qwen2_5_vl": {"text_config": {**_TINY, **_GROUPED}, "vision_config": _QWEN_VIT},
    "qwen3_vl": {
        "text_config": {**_TINY, **_WIDE_HEADS},
        "vision_config": {**_QWEN_VIT, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        "text_config": {**_TINY, **_WIDE_HEADS, "num_experts": 4, **_SPARSE},
        "vision_config": {**_QWEN_VIT, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {"text_config": {**_TINY, **_WIDE_HEADS, **_DELTA}, "vision_config": _QWEN_VIT},
    "qwen3_5_moe": {"text_config": {**_TINY, **_MORE["qwen3_5_moe_text"]}, "vision_config": _QWEN_VIT},
}
_IMAGE_VARIANTS = [
    (
        "llava",
        {
            "text_config": {"model_type": "qwen2", **_TINY},
            "vision_config": {"model_type": "siglip_vision_model", **_VIT},
            "vision_feature_layer": [-2, -1],
        },
    ),
    (
        "llava",
        {
            "text_config": {"model_type": "mistral", **_TINY},
            "vision_config": {"model_type": "clip_vision_model", **_VIT},
            "multimodal_projector_bias": False,
        },
    ),
    ("qwen2_5_vl", {**_IMAGES["qwen2_5_vl"], "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "fields"), [*_IMAGES.items(), *_IMAGE_VARIANTS])
def test_parameters_are_those_of_the_model_with_its_tower(kind, fields):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    model.tie_weights()
    expected = sum({id(each): each.numel() for each in model.parameters()}.values())

    found = architecture_from_config(json.loads(config.to_json_string(use_diff=False)), kind)
    assert found.tower is not None and found.num_parameters() == expected
    assert found.tower.num_parameters() > 0 == found.tower.images


def test_every_tower_is_held_against_transformers():
    assert sorted(_IMAGES) == sorted(TOWERS)


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_what_a_config_inside_another_leaves_out_is_what_its_class_takes(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    for key, value in TEXT_DEFAULTS[kind].items():
        assert getattr(config, key) == value, key


def test_a_tower_that_is_not_known_is_said_to_be_left_out():
    config = {
        "model_type": "other_vl",
        "text_config": {"model_type": "llama", **_TINY},
        "vision_config": {},
        "audio_config": {},
    }
    found = architecture_from_config(config, "x")

    assert found.tower is None
    assert found.left_out == "the vision tower and the audio tower"


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "t5"}, {"model_type": ["llama"]}, {"model_type": "llama"}, {"model_type": "llama", **_TINY, "vocab_size": "many"},
     {"model_type": "llama", **_TINY, "num_attention_heads": 7}, {"model_type": "qwen3_moe", **_TINY, "num_experts": 4, **_SPARSE, "mlp_only_layers": [2]},
     {"model_type": "bart", **_STACKS, "vocab_size": 96, "decoder_ffn_dim": 64},
     {"model_type": "t5", **_MORE["t5"], "vocab_size": 96, "feed_forward_proj": "swish"},
     {"model_type": "llama4_text", **_TINY, **_WIDE_HEADS, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0, 1]},
     {"model_type": "ernie4_5_moe", **_TINY, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
     {"model_type": "dots1", **_TINY, **_SPARSE, "n_routed_experts": 4, "n_shared_experts": "two"},
     {"model_type": "hunyuan_v1_moe", **_TINY, "num_experts": [4, 4, 4], "moe_topk": 2},
     {"model_type": "opt", **_TINY, "word_embed_proj_dim": 32, "max_position_embeddings": 8}],
)  # fmt: skip
def test_what_is_not_known_is_one_line(config):
    with pytest.raises(UsageError) as caught:
        architecture_from_config(config, "config.json")
    assert "\n" not in caught.value.one_line()


def test_the_language_model_inside_another_is_read():
    config = {"model_type": "llava", "text_config": {"model_type": "llama", **_TINY}}
    assert architecture_from_config(config, "x").ffn == 112


@pytest.mark.parametrize(("kind", "other"), _ALIKE.items())
def test_what_is_built_like_another_is_read_like_it(kind, other):
    fields = {**_TINY, **_MORE.get(other, {})}
    read = [architecture_from_config({**fields, "model_type": each}, "x") for each in (kind, other)]

    assert read[0] == read[1]


def test_the_page_names_every_type():
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    listed = re.findall(r"^    - [a-z][a-z -]+: (.*)[.;]$", page, re.MULTILINE)

    assert sorted(name for line in listed for name in line.split(", ")) == sorted([*_READERS, *_ALIKE])
