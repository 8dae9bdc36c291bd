"""Named models have the parameters that their publishers state; files are read whole or refused in one line."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.architectures.load import (
    ARCHITECTURES,
    architecture_from_fields,
    load_architecture,
    named_architecture,
)
from memadvisor.errors import UsageError
from tests.architectures.published_counts import ACTIVE, EXACT, ROUNDED


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_those_of_the_published_checkpoint(name):
    assert load_architecture(name).num_parameters() == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_those_that_the_paper_prints(name):
    assert load_architecture(name).num_parameters() / 1e9 == pytest.approx(ROUNDED[name], rel=0.03)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_that_the_paper_prints(name):
    """Papers leave out one of the two tables of tokens now and then, or both."""
    architecture = load_architecture(name)
    table = architecture.head_parameters()
    counts = [architecture.active_parameters() - left_out * table for left_out in range(3)]
    assert min(abs(count / 1e9 / ACTIVE[name] - 1) for count in counts) < 0.03


def test_heads_fill_what_they_should_and_no_two_models_share_a_name():
    for each in ARCHITECTURES:
        assert each.n_heads % each.n_kv_heads == 0, each.name
        assert named_architecture(each.name) is each


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4-scout"),
        ("ViT-L/16", "vit-l-16"),
        ("google/vit-base-patch16-224", "vit-b-16"),
        ("LLaMA 65B", "llama-65b"),
        ("Llama-65B", "llama-65b"),
        ("Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("Llama-3.1-70B", "llama3-70b"),
        ("llama3_405b", "llama3-405b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("gpt3_175b", "gpt3-175b"),
        ("GPT-2 XL", "gpt2-xl"),
        ("openai-community/gpt2", "gpt2"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen/Qwen3.6-35B-A3B", "qwen3.5-35b-a3b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
        ("google/gemma-2b", "gemma-2b"),
        ("bigscience/bloom", "bloom-176b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("allenai/OLMo-2-1124-7B", "olmo2-7b"),
        ("MT-NLG 530B", "megatron-530b"),
        ("Phi-4 (14B)", "phi-4"),
        ("DeepSeek-V3-671B-A37B", "deepseek-v3"),
        ("Phi-2 2.7B", "phi-2"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", "olmoe-1b-7b"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "moonlight-16b-a3b"),
        ("allenai/Olmo-3-1025-7B", "olmo3-7b"),
        ("allenai/Olmo-3-32B-Think", "olmo3-32b"),
        ("PrimeIntellect/INTELLECT-3", "glm-4.5-air"),
        ("bigscience/T0_3B", "flan-t5-xl"),
        ("bigscience/mt0-xxl", "mt5-xxl"),
        ("google/t5-v1_1-xl", "flan-t5-xl"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b-a35b"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-24b"),
    ],
)
def test_spellings(spelling, name):
    found = named_architecture(spelling)
    assert found is not None and found.name == name


def test_a_name_with_another_size_is_another_model():
    assert named_architecture("Phi-4 7B") is None


def test_own_fields(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "n_layers = 2\nhidden = 64\nn_heads = 4\nvocab = 100\n[experts]\nnum_experts = 4\nexperts_per_token = 2\nexpert_ffn = 32\n"
    )
    found = load_architecture(str(tmp_path / "mine.toml"))

    assert (found.name, found.head_dim, found.ffn, found.experts.num_experts) == ("mine", 16, 256, 4)


def test_a_directory_with_a_config_of_hugging_face(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
              "intermediate_size": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_architecture(str(tmp_path)).ffn == 128


@pytest.mark.parametrize(
    "text",
    ["n_layers = 2", "n_layers = 2\nhidden = 64\nn_heads = 5\nvocab = 9", "n_layers = 0\nhidden = 64\nn_heads = 4\nvocab = 9",
     "n_layers = 2\nhidden = 64\nn_heads = 4\nvocab = 9\ncolour = 1", "n_layers = true\nhidden = 64\nn_heads = 4\nvocab = 9",
     "n_layers = 2\nhidden = 64\nn_heads = 4\nvocab = 9\nexperts = 3", "][",
     f"n_layers = {10**30}\nhidden = 64\nn_heads = 4\nvocab = 9", f"n_layers = 2\nhidden = 64\nn_heads = 4\nvocab = {2**63}",
     "n_layers = 2\nhidden = 64\nn_heads = 4\nvocab = 9\n[experts]\nnum_experts = 4\nexperts_per_token = 5\nexpert_ffn = 8"],
)  # fmt: skip
def test_broken_files_are_one_line(tmp_path, text):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_architecture(str(tmp_path / "bad.toml"))
    assert "\n" not in caught.value.one_line()


def test_a_byte_order_mark_is_read_over_and_a_broken_line_is_named(tmp_path):
    text = "n_layers = 2\nhidden = 64\nn_heads = 4\nvocab = 100\n"
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8-sig")
    assert load_architecture(str(tmp_path / "mine.toml")).hidden == 64

    (tmp_path / "mine.toml").write_text(text.replace("n_heads =", "n_heads"))
    with pytest.raises(UsageError, match=r"is not TOML: .*line 3, column"):
        load_architecture(str(tmp_path / "mine.toml"))
    (tmp_path / "config.json").write_text('{"model_type": "llama",\n "hidden_size" 64}')
    with pytest.raises(UsageError, match=r"is not JSON: .*, line 2, column 16"):
        load_architecture(str(tmp_path))


def test_near_names_of_one_model_are_said_once():
    """DeepSeek-V3.1 is one more name of DeepSeek-V3's shapes."""
    with pytest.raises(UsageError) as raised:
        load_architecture("deepseek-v3.5")
    assert raised.value.hint.count("deepseek-v3 ") == 1


@pytest.mark.parametrize(
    ("written", "name"),
    [("Command R+", "command-r-plus-104b"), ("Command R", "command-r-35b"), ("openai/whisper-large-v3", "whisper-large-v3"),
     ("bigscience/bloomz-7b1", "bloom-7b1"), ("Granite 3.1 8B", "granite-3-8b"), ("facebook/nllb-200-3.3B", "nllb-200-3.3b")],
)  # fmt: skip
def test_a_name_may_be_written_otherwise(written, name):
    assert load_architecture(written).name == name


def test_what_is_neither_a_name_nor_a_file():
    with pytest.raises(UsageError, match=r"llama3-9b") as caught:
        load_architecture("llama3-9b")
    assert "llama3-8b" in caught.value.hint


@given(
    st.dictionaries(
        st.sampled_from(["n_layers", "hidden", "n_heads", "vocab", "ffn", "head_dim", "gated_mlp", "experts", "latent", "x"]),
        st.one_of(st.none(), st.booleans(), st.integers(-2, 64), st.text(max_size=3), st.dictionaries(st.text(max_size=3), st.none(), max_size=1)),
    )
)  # fmt: skip
def test_any_fields_give_an_architecture_or_one_line(fields):
    with contextlib.suppress(UsageError):
        assert architecture_from_fields(fields, "x").num_parameters() > 0


@pytest.mark.parametrize("name", ["gemma3-27b", "llama4-maverick", "llama4-scout"])
def test_names_of_models_with_images_say_what_is_left_out(name):
    assert load_architecture(name).left_out == "the vision tower"
    assert load_architecture("gemma3-1b").left_out == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [("BlinkDL/rwkv-7-world", "none of the recurrences"), ("google/gemma-3n-E4B-it", "AltUp"), ("DeepSeek-V4-Flash", "hyper-connections"),
     ("stepfun-ai/step3", "few columns"), ("CLIP ViT-L/14", "two towers"), ("DiT-XL/2", "adaLN"), ("swin-b", "widths")],
)  # fmt: skip
def test_a_model_that_no_fields_say_is_refused_with_the_reason(name, said):
    with pytest.raises(UsageError, match=said):
        load_architecture(name)
