"""Whatever a config.json says in a number's or a list's place, it is read or refused in one line."""

import copy

import pytest

from memadvisor.architectures.hugging_face import architecture_from_config
from memadvisor.architectures.load import _of_a_size
from memadvisor.errors import UsageError
from tests.architectures.small_configs import IMAGES, MORE, TINY

JUNK = (None, "x", [], {}, -1, 0, 3.5, True, ["x"], [None], {"a": 1}, 10**30)
SAID_SOMETIMES = (
    "layer_types", "layers_block_type", "hybrid_override_pattern", "full_attention_interval", "attn_layer_indices", "attn_layer_period",
    "moe_layers", "interleave_moe_layer_step", "decoder_sparse_step", "mlp_only_layers", "moe_layer_end_index", "moe_layer_freq",
    "expert_layer_period", "expert_layer_offset", "expand", "mamba_expand", "time_step_rank", "mamba_dt_rank", "tie_word_embeddings",
    "vision_feature_layer",
)  # fmt: skip
OF_TOWERS = ("patch_size", "image_size", "temporal_patch_size", "spatial_merge_size", "deepstack_visual_indexes", "vision_use_head")  # fmt: skip


def places_of(config, before=()):
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from places_of(value, (*before, key))


def config_of(kind):
    fields = IMAGES[kind] if kind in IMAGES else {**TINY, **MORE[kind]}
    return {"model_type": kind, **{key: value for key, value in fields.items() if value is not None}}


@pytest.mark.parametrize("kind", [*MORE, *IMAGES])
def test_any_value_is_read_or_refused_in_one_line(kind):
    config = config_of(kind)
    places = [*places_of(config), *((key,) for key in SAID_SOMETIMES)]
    if kind in IMAGES:
        places += [("vision_config", key) for key in OF_TOWERS] + [
            ("text_config", key) for key in SAID_SOMETIMES
        ]
    for *before, key in places:
        for value in JUNK:
            changed = copy.deepcopy(config)
            inner = changed
            for each in before:
                inner = inner[each]
            inner[key] = value
            try:
                found = _of_a_size(architecture_from_config(changed, "config.json"))
            except UsageError as error:
                assert "\n" not in error.one_line()
            else:
                assert found.num_parameters() > 0 < found.active_parameters()
