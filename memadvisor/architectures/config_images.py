"""Models of text and images out of a Hugging Face config.json: the language model inside, and the vision tower before it.

Parameters of a tower are those that transformers builds. Its layers are taken for an encoder's over all patches of an
image: windows of attention (Qwen2.5-VL) are not told apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from memadvisor.architecture import Architecture, VisionTower
from memadvisor.architectures.config_shapes import MOST_LAYERS
from memadvisor.architectures.config_values import Config, layer_numbers, whole
from memadvisor.errors import UsageError

# What the classes of language models take where a config inside another leaves it out (transformers 5.24).
_LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
_GEMMA2 = {"hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
           "intermediate_size": 9216, "vocab_size": 256000}  # fmt: skip
TEXT_DEFAULTS: dict[str, Config] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "intermediate_size": 14336},
    "gemma": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
              "intermediate_size": 24576, "vocab_size": 256000},
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA2, "vocab_size": 262208},
    "qwen2": {**_LLAMA, "intermediate_size": 22016, "vocab_size": 151936},
    "qwen3": {**_LLAMA, "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22016, "vocab_size": 151936},
}  # fmt: skip
_PARTS = {
    "vision_config": "the vision tower",
    "audio_config": "the audio tower",
    "qformer_config": "the Q-Former",
}


def text_of(config: Config) -> Config:
    """What says how the language model is built. Whether its embeddings are tied the outer config says, where it does."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    defaults = TEXT_DEFAULTS.get(str(inner.get("model_type")), {})
    given = {key: value for key, value in inner.items() if value is not None}
    tied = config.get("tie_word_embeddings")
    return {**defaults, **given, **({} if tied is None else {"tie_word_embeddings": tied})}


def with_images(config: Config, found: Architecture) -> Architecture:
    """The language model with the tower before it, where its kind is known; else with what is left out."""
    kind, vision = config.get("model_type"), config.get("vision_config")
    reader = _TOWERS.get(kind) if isinstance(kind, str) else None
    left_out = _left_out(config)
    if reader is None or not isinstance(vision, Mapping):
        return dataclasses.replace(found, left_out=" and ".join(left_out))
    return dataclasses.replace(found, tower=reader(config, vision, found))


def _left_out(config: Config) -> list[str]:
    """Other models that this one has inside, in words; a part is a model where its own config names its type."""
    found = [words for key, words in _PARTS.items() if isinstance(config.get(key), Mapping)]
    others = (key for key in config if key.endswith("_config") and key not in _PARTS and key != "text_config")
    for key in sorted(others):
        inner = config[key]
        if isinstance(inner, Mapping) and inner.get("model_type"):
            found.append(f"what {key} describes")
    return [*found, "the patches' projection"] if config.get("model_type") == "fuyu" else found


def _stack(
    vision: Config, hidden: int, ffn: int, *, gated: bool = False, norm_vectors: int = 2
) -> Architecture:
    heads = whole(vision, "num_heads", "num_attention_heads", default=16)
    if hidden % heads:
        raise UsageError(f"{heads} heads do not divide hidden {hidden} of the vision tower.")
    n_layers = whole(vision, "depth", "num_hidden_layers")
    if n_layers > MOST_LAYERS:
        raise UsageError(
            f"the vision tower has more than {MOST_LAYERS:,} layers.",
            hint="look for a digit too many in the file.",
        )
    return Architecture(
        name="vision tower",
        n_layers=n_layers,
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=0,
        tied_embeddings=True,
        gated_mlp=gated,
        biases=True,
        norm_vectors=norm_vectors,
        causal=False,
        final_norm=False,
    )


def _side(vision: Config, key: str, default: int) -> int:
    """Of a square that may be given by both sides."""
    value = vision.get(key)
    return whole({key: value[0] if isinstance(value, list) and value else value}, key, default=default)


def _merger(hidden: int, merged: int, columns: int, norm: int) -> int:
    """A norm, and two products with biases over `merged` patches side by side."""
    wide = hidden * merged
    return norm + wide * wide + wide + wide * columns + columns


def _qwen(vision: Config, stack: Architecture, *, patch: int, columns: int) -> VisionTower:
    """Of the family: patches of two frames, merged by fours, whose number follows from the image."""
    merged = whole(vision, "spatial_merge_size", default=2) ** 2
    channels = whole(vision, "in_channels", "in_chans", default=3)
    frames = _side(vision, "temporal_patch_size", 2)
    patches = channels * frames * _side(vision, "patch_size", patch) ** 2 * stack.hidden
    around = patches + _merger(stack.hidden, merged, columns, stack.norm_parameters())
    return VisionTower(stack=stack, around=around, merged=merged)


def _qwen2_vl(config: Config, vision: Config, found: Architecture) -> VisionTower:
    hidden = whole(vision, "embed_dim", default=1280)
    stack = _stack({"depth": 32, **vision}, hidden, whole(vision, "mlp_ratio", default=4) * hidden)
    return _qwen(vision, stack, patch=14, columns=whole(vision, "hidden_size", default=3584))


def _qwen2_5_vl(config: Config, vision: Config, found: Architecture) -> VisionTower:
    hidden, ffn = whole(vision, "hidden_size", default=3584), whole(vision, "intermediate_size", default=3420)
    stack = _stack({"depth": 32, **vision}, hidden, ffn, gated=True, norm_vectors=1)
    return _qwen(vision, stack, patch=14, columns=whole(vision, "out_hidden_size", default=3584))


def _qwen3_vl(config: Config, vision: Config, found: Architecture) -> VisionTower:
    """A table of positions, a bias of the patches, and of some layers' results mergers of their own (Qwen3-VL)."""
    hidden, ffn = whole(vision, "hidden_size", default=1152), whole(vision, "intermediate_size", default=4304)
    stack = _stack({"depth": 27, **vision}, hidden, ffn)
    columns = whole(vision, "out_hidden_size", default=3584)
    tower = _qwen(vision, stack, patch=16, columns=columns)
    more = hidden + whole(vision, "num_position_embeddings", default=2304) * hidden
    has_deep = str(config.get("model_type")).startswith("qwen3_vl")
    deep = (
        layer_numbers({"deepstack_visual_indexes": [8, 16, 24], **vision}, "deepstack_visual_indexes")
        if has_deep
        else []
    )
    more += len(deep or []) * _merger(hidden, tower.merged, columns, 2 * hidden * tower.merged)
    return dataclasses.replace(tower, around=tower.around + more)


def _clip_or_siglip(vision: Config) -> tuple[Architecture, int, int]:
    """Its layers, what is around them, and patches of an image."""
    kind = vision.get("model_type")
    is_clip = kind == "clip_vision_model"
    hidden, ffn = whole(vision, "hidden_size", default=768), whole(vision, "intermediate_size", default=3072)
    stack = _stack({"num_hidden_layers": 12, "num_attention_heads": 12, **vision}, hidden, ffn)
    patch = _side(vision, "patch_size", 32 if is_clip else 16)
    patches = (_side(vision, "image_size", 224) // patch) ** 2
    around = whole(vision, "num_channels", default=3) * patch**2 * hidden + patches * hidden + 2 * hidden
    if is_clip:  # one token more, and a norm before the layers
        return stack, around + 4 * hidden, patches
    around += hidden  # the patches' bias
    if kind == "siglip_vision_model" and vision.get("vision_use_head", True):
        # A token that attends to all, a norm, and a block.
        around += hidden + 4 * hidden * (hidden + 1) + 2 * hidden + hidden * (2 * ffn + 1) + ffn
    return stack, around, patches


def _llava(config: Config, vision: Config, found: Architecture) -> VisionTower:
    if vision.get("model_type") not in ("clip_vision_model", "siglip_vision_model"):
        raise UsageError(
            f"a vision tower of type {vision.get('model_type')!r} is not known.",
            hint="it is CLIP's or SigLIP's.",
        )
    usual = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 336}  # fmt: skip
    stack, around, patches = _clip_or_siglip({**usual, **vision})
    layers = config.get("vision_feature_layer")
    wide = stack.hidden * (len(layers) if isinstance(layers, list) else 1)
    biases = 2 * found.hidden if config.get("multimodal_projector_bias", True) else 0
    around += (wide + found.hidden) * found.hidden + biases
    return VisionTower(stack=stack, around=around, image_tokens=patches)


def _llava_next(config: Config, vision: Config, found: Architecture) -> VisionTower:
    """A vector behind each row of an image, of which there are as many parts as fit it."""
    tower = _llava(config, vision, found)
    return dataclasses.replace(tower, around=tower.around + found.hidden, image_tokens=None)


def _llava_onevision(config: Config, vision: Config, found: Architecture) -> VisionTower:
    usual = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "image_size": 384, "vision_use_head": False}  # fmt: skip
    return _llava_next(config, {**usual, **vision}, found)


def _vipllava(config: Config, vision: Config, found: Architecture) -> VisionTower:
    """Results of several layers side by side, and a norm over them."""
    layers = config.get("vision_feature_layers", config.get("vision_feature_layer"))
    listed = layers if isinstance(layers, list) else [-2, -5, -8, -11, 6]
    words = {"vision_feature_layer": listed, "multimodal_projector_bias": True}
    tower = _llava({**config, **words}, vision, found)
    return dataclasses.replace(tower, around=tower.around + 2 * len(listed) * tower.stack.hidden)


def _gemma3(config: Config, vision: Config, found: Architecture) -> VisionTower:
    stack, around, patches = _clip_or_siglip({"model_type": "siglip_vision_model", **vision})
    tokens = whole(config, "mm_tokens_per_image", default=256)
    around += stack.hidden * found.hidden + stack.hidden
    return VisionTower(stack=stack, around=around, image_tokens=tokens, merged=max(1, patches // tokens))


def _paligemma(config: Config, vision: Config, found: Architecture) -> VisionTower:
    stack, around, patches = _clip_or_siglip({"model_type": "siglip_vision_model", **vision})
    columns = whole(config, "projection_dim", default=2048)
    return VisionTower(stack=stack, around=around + (stack.hidden + 1) * columns, image_tokens=patches)


_TOWERS: dict[str, Callable[[Config, Config, Architecture], VisionTower]] = {
    "gemma3": _gemma3,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next,
    "llava_onevision": _llava_onevision,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "vipllava": _vipllava,
}
TOWERS = tuple(_TOWERS)
