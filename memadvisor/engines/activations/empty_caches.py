"""Key/value caches of transformers' models in training: a recomputed unit is called without one that holds nothing of it.

Such a model makes a cache in a training forward too (`use_cache` is on by default). It would keep the keys and values
of each recomputed unit until the backward, which is what recomputing it is to free, and each second run would add them
to it again. transformers leaves it out where it checkpoints layers itself. A cache that has something of the unit
already (a trained prefix) stays, and so does one in which other layers look for this one's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def without_empty_caches(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a unit's call with None for caches that hold nothing of it."""
    kind: Any = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if kind is None or not any(isinstance(value, kind) for value in (*args, *kwargs.values())):
        return args, kwargs

    def kept(value: Any) -> Any:
        return None if isinstance(value, kind) and _holds_nothing_of(module, value) else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


def _holds_nothing_of(module: torch.nn.Module, cache: Any) -> bool:
    inner = list(module.modules())
    places = {place for each in inner if isinstance(place := getattr(each, "layer_idx", None), int)}
    is_shared = any(hasattr(each, "is_kv_shared_layer") for each in inner)
    return len(places) == 1 and not is_shared and cache.get_seq_length(places.pop()) == 0
