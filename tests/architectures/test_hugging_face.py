"""What is read from a config.json has as many parameters as the model that transformers builds from it."""

import json
import re
from pathlib import Path

import pytest

from memadvisor.architectures.config_encoders import ENCODER_READERS
from memadvisor.architectures.config_images import TEXT_DEFAULTS, TOWERS
from memadvisor.architectures.config_patches import PATCH_READERS
from memadvisor.architectures.encoder_decoders import ENCODER_DECODER_READERS
from memadvisor.architectures.hugging_face import _ALIKE, _READERS, architecture_from_config
from memadvisor.errors import UsageError
from tests.architectures.small_configs import (
    IMAGE_VARIANTS,
    IMAGES,
    MORE,
    SPARSE,
    STACKS,
    TINY,
    VARIANTS,
    WIDE_HEADS,
)


@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in _READERS), *VARIANTS])
def test_parameters_are_those_of_the_model(kind, more):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    fields = {
        **TINY,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **MORE.get(kind, {}),
        **more,
    }
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if v is not None})
    auto = transformers.AutoModelForCausalLM
    if kind == "whisper":
        auto = transformers.AutoModelForSpeechSeq2Seq
    elif kind in ENCODER_DECODER_READERS:
        auto = transformers.AutoModelForSeq2SeqLM
    elif kind in ENCODER_READERS and not kind.endswith("-decoder"):
        auto = transformers.AutoModelForMaskedLM
    elif kind == "mistral4":
        auto = transformers.AutoModelForImageTextToText
    if kind in PATCH_READERS:
        model = _classifier(kind, config)
    else:
        with torch.device("meta"):
            model = auto.from_config(config)
    model.tie_weights()
    expected = sum({id(each): each.numel() for each in model.parameters()}.values())

    assert architecture_from_config(json.loads(config.to_json_string()), kind).num_parameters() == expected


def _classifier(kind, config):
    """Of images or sounds, with nothing in memory; of two classes (DeiT has one with a teacher) the first."""
    import torch
    import transformers

    auto = transformers.AutoModelForImageClassification
    if kind == "audio-spectrogram-transformer":
        auto = transformers.AutoModelForAudioClassification
    found = auto._model_mapping[type(config)]
    with torch.device("meta"):
        return (found[0] if isinstance(found, tuple) else found)(config)


@pytest.mark.parametrize(("kind", "fields"), [*IMAGES.items(), *IMAGE_VARIANTS])
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
    assert sorted(IMAGES) == sorted(TOWERS)


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_what_a_config_inside_another_leaves_out_is_what_its_class_takes(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    for key, value in TEXT_DEFAULTS[kind].items():
        assert getattr(config, key) == value, key


def test_a_tower_that_is_not_known_is_said_to_be_left_out():
    config = {
        "model_type": "other_vl",
        "text_config": {"model_type": "llama", **TINY},
        "vision_config": {},
        "audio_config": {},
        "speaker_config": {"model_type": "speaker"},
        "quantization_config": {"bits": 4},
    }
    found = architecture_from_config(config, "x")

    assert found.tower is None
    assert found.left_out == "the vision tower and the audio tower and what speaker_config describes"


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "t5"}, {"model_type": ["llama"]}, {"model_type": "llama"}, {"model_type": "llama", **TINY, "vocab_size": "many"},
     {"model_type": "llama", **TINY, "num_attention_heads": 7}, {"model_type": "qwen3_moe", **TINY, "num_experts": 4, **SPARSE, "mlp_only_layers": [2]},
     {"model_type": "bart", **STACKS, "vocab_size": 96, "decoder_ffn_dim": 64},
     {"model_type": "t5", **MORE["t5"], "vocab_size": 96, "feed_forward_proj": "swish"},
     {"model_type": "llama4_text", **TINY, **WIDE_HEADS, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0, 1]},
     {"model_type": "ernie4_5_moe", **TINY, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
     {"model_type": "dots1", **TINY, **SPARSE, "n_routed_experts": 4, "n_shared_experts": "two"},
     {"model_type": "hunyuan_v1_moe", **TINY, "num_experts": [4, 4, 4], "moe_topk": 2},
     {"model_type": "grounding-dino", "text_config": {"model_type": "bert", **TINY}},
     {"model_type": "electra", **TINY, "embedding_size": 32},
     {"model_type": "marian", **STACKS, "vocab_size": 96, "decoder_vocab_size": 90},
     {"model_type": "glm_moe_dsa", **TINY, **MORE["glm_moe_dsa"], "indexer_types": ["full", "shared", "full"]},
     {"model_type": "opt", **TINY, "word_embed_proj_dim": 32, "max_position_embeddings": 8}],
)  # fmt: skip
def test_what_is_not_known_is_one_line(config):
    with pytest.raises(UsageError) as caught:
        architecture_from_config(config, "config.json")
    assert "\n" not in caught.value.one_line()


def test_the_language_model_inside_another_is_read():
    config = {"model_type": "llava", "text_config": {"model_type": "llama", **TINY}}
    assert architecture_from_config(config, "x").ffn == 112


@pytest.mark.parametrize(("kind", "other"), _ALIKE.items())
def test_what_is_built_like_another_is_read_like_it(kind, other):
    fields = {**TINY, **MORE.get(other, {})}
    read = [architecture_from_config({**fields, "model_type": each}, "x") for each in (kind, other)]

    assert read[0] == read[1]


def test_the_page_names_every_type():
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    listed = re.findall(r"^    - [a-z][a-z -]+: (.*)[.;]$", page, re.MULTILINE)

    assert sorted(name for line in listed for name in line.split(", ")) == sorted([*_READERS, *_ALIKE])


def test_lfm2_has_as_many_parameters_as_its_checkpoint():
    """https://huggingface.co/LiquidAI/LFM2-1.2B: 1.17 billion; its blocks are two thirds of what its config says."""
    config = {
        "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 65536, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_embedding": True,
    }  # fmt: skip
    found = architecture_from_config(config, "lfm2-1.2b")

    assert (found.num_parameters(), found.ffn) == (1_170_340_608, 8192)
    assert found.layer_pattern == "rrarrarrararara" + "r"
