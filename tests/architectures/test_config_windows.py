"""Windows of attention are those of the config.json, or of its class where it says nothing."""

import pytest

from memadvisor.architectures.hugging_face import architecture_from_config
from memadvisor.architectures.load import named_architecture

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "window", "full_every"),
    [
        ({"model_type": "gemma2"}, 4096, 2),
        ({"model_type": "gemma3_text", "sliding_window": 512}, 512, 6),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, 4096, 4),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0),
        ({"model_type": "mistral", "sliding_window": 1024}, 1024, 0),
        ({"model_type": "qwen2", "sliding_window": 4096}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096, 0),
        ({"model_type": "llama", "sliding_window": 4096}, 0, 0),
        ({"model_type": "olmo3", "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 2}, 4096, 4),
        ({"model_type": "vaultgemma"}, 4096, 2),
        (
            {"model_type": "afmoe", "num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
            1024,
            4,
        ),
        # Where they recur otherwise than from the first layer on, all are taken to see all.
        ({"model_type": "olmo3", "layer_types": [SLIDING] * 5 + [FULL] * 3}, 0, 0),
        ({"model_type": "olmo3", "layer_types": [FULL, SLIDING] * 4}, 0, 0),
    ],
)
def test_windows_of_a_config(config, window, full_every):
    found = architecture_from_config({**SIZES, **config}, "it")

    assert (found.window, found.full_every) == (window, full_every)


def test_gpt_oss_has_one_by_name_in_every_second_layer():
    model = named_architecture("gpt-oss-20b")

    assert model is not None
    assert [model.window_of(layer) for layer in range(4)] == [128, 0, 128, 0]
