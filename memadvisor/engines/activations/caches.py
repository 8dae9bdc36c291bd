"""Key/value caches of transformers' models in training: a recomputed unit is called without one that holds nothing of it,
and again with one as it was.

Such a model makes a cache in a training forward too (`use_cache` is on by default). It would keep the keys and values
of each recomputed unit until the backward, which is what recomputing it is to free. transformers leaves it out where it
checkpoints layers itself. A cache that has something of the unit already (a trained prefix) stays, and so does one in
which other layers look for this one's. A unit adds its keys and values to such a one, so a second run is given a copy
of it as it was before the first: it would add them again.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memadvisor.errors import PlanError


class EmptyCaches:
    """Those that units were called without: empty ones, that the model has made for this forward.

    A script that gives such a cache to a later forward would have it attend to what was left out: it is refused.
    """

    def __init__(self) -> None:
        self._left_out: weakref.WeakKeyDictionary[Any, weakref.WeakSet[torch.nn.Module]] = (
            weakref.WeakKeyDictionary()
        )

    def leave_out(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a unit's call with None for caches that hold nothing of it. Raises PlanError."""
        kind = _kind_of_caches()
        if kind is None or not any(isinstance(value, kind) for value in (*args, *kwargs.values())):
            return args, kwargs

        def kept(value: Any) -> Any:
            if not isinstance(value, kind) or not _holds_nothing_of(module, value):
                return value
            modules = self._left_out.setdefault(value, weakref.WeakSet())
            if module in modules:
                raise PlanError(
                    "The script gives a forward the keys and values of an earlier one, which recomputed units do not keep.",
                    hint="make a plan that recomputes nothing (more --memory), or carry no past_key_values over.",
                )
            modules.add(module)
            return None

        return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


def _holds_nothing_of(module: torch.nn.Module, cache: Any) -> bool:
    inner = list(module.modules())
    places = {place for each in inner if isinstance(place := getattr(each, "layer_idx", None), int)}
    is_shared = any(hasattr(each, "is_kv_shared_layer") for each in inner)
    return len(places) == 1 and not is_shared and cache.get_seq_length(places.pop()) == 0


def with_caches_as_they_were(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """A forward that is about to be called with these arguments, and may be called with them again."""
    kind = _kind_of_caches()
    caches = [value for value in (*args, *kwargs.values()) if kind is not None and isinstance(value, kind)]
    return _WithCachesAsTheyWere(forward, caches) if caches else forward


class _WithCachesAsTheyWere:
    def __init__(self, forward: Callable[..., Any], caches: list[Any]) -> None:
        self._forward = forward
        self._before = {id(cache): (cache, _copied(cache)) for cache in caches}
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            return self._forward(*args, **kwargs)
        return self._forward(
            *map(self._as_it_was, args), **{name: self._as_it_was(value) for name, value in kwargs.items()}
        )

    def _as_it_was(self, value: Any) -> Any:
        # A copy of the copy: there may be a third run.
        return _copied(self._before[id(value)][1]) if id(value) in self._before else value


def _copied(value: Any) -> Any:
    """A cache, its layers, and their lists and dictionaries; the tensors in them are the same."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    kind = _kind_of_caches()
    if isinstance(value, kind) or hasattr(value, "lazy_initialization"):  # a cache, or a layer of one
        copied = copy.copy(value)
        for name, each in vars(value).items():
            setattr(copied, name, _copied(each))
        return copied
    return value


def _kind_of_caches() -> Any:
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
