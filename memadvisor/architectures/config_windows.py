"""Layers that see a window of the tokens before them alone, out of a Hugging Face config.json."""

from __future__ import annotations

import dataclasses

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_values import Config, whole

# Of types whose class has windows where the config says nothing of layers: the window, and each so-many-th layer that sees
# all (0: none), as its configuration class has them by default (transformers 5.x).
_USUAL = {
    "afmoe": (1024, 4),
    "cohere2": (4096, 4),
    "exaone4": (4096, 4),
    "exaone_moe": (4096, 4),
    "gemma2": (4096, 2),
    "gemma3_text": (4096, 6),
    "gpt_oss": (128, 2),
    "mistral": (4096, 0),
    "olmo3": (4096, 4),
    "vaultgemma": (4096, 2),
}
# Types whose windows are there only where the config says so.
_OTHERS = (
    "mellum",
    "phi3",
    "starcoder2",
    "mixtral",
    "ministral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)


def with_windows(config: Config, found: Architecture) -> Architecture:
    """The same model with its windows, where they recur from layer to layer; of others all layers are taken to see all."""
    kind = str(config.get("model_type"))
    if kind not in _USUAL and kind not in _OTHERS:
        return found
    size, usual = _USUAL.get(kind, (0, 0))
    every: int | None = usual
    if "sliding_window" in config:
        size = (
            whole(config, "sliding_window", default=0, least=0) if config["sliding_window"] is not None else 0
        )
    if not size or config.get("use_sliding_window", kind in _USUAL or not kind.startswith("qwen")) is False:
        return found
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        every = _every(types)
    elif isinstance(config.get("sliding_window_pattern"), int):
        every = whole(config, "sliding_window_pattern")
    if every is None or every == 1:
        return found
    return dataclasses.replace(found, window=size, full_every=every)


def _every(types: list[object]) -> int | None:
    """Each so-many-th layer sees all, of layers in this order; 0 where none does; None where they recur otherwise."""
    windowed = [kind == "sliding_attention" for kind in types]
    if False not in windowed:
        return 0
    every = windowed.index(False) + 1
    recurs = all(each == ((layer + 1) % every != 0) for layer, each in enumerate(windowed))
    return every if recurs else None
