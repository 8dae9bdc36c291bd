"""Key/value caches of transformers' models, as capture and engines know them: which layer of one a unit looks into."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch


def kind_of_caches() -> Any:
    """The class; None where transformers' caches are not imported."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


def own_place(module: torch.nn.Module) -> int | None:
    """The only layer of a cache that a unit looks into; None where it looks into several, or others into its."""
    inner = list(module.modules())
    places = {place for each in inner if isinstance(place := getattr(each, "layer_idx", None), int)}
    is_shared = any(hasattr(each, "is_kv_shared_layer") for each in inner)
    return places.pop() if len(places) == 1 and not is_shared else None


def caches_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The caches that a module is called with."""
    kind = kind_of_caches()
    return [] if kind is None else [each for each in (*args, *kwargs.values()) if isinstance(each, kind)]


def tensors_of(cache: Any, place: int) -> Iterator[torch.Tensor]:
    """What a cache holds of one layer, itself or in caches of its own (an encoder's and a decoder's)."""
    kind = kind_of_caches()
    for content in vars(cache).values():
        if kind is not None and isinstance(content, kind):
            yield from tensors_of(content, place)
            continue
        if isinstance(content, list):
            layer = content[place] if place < len(content) else None
        else:
            layer = content.get(place) if isinstance(content, dict) else None
        for each in (layer, *vars(layer).values()) if hasattr(layer, "__dict__") else (layer,):
            if isinstance(each, torch.Tensor):
                yield each
