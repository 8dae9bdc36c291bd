"""Key/value caches of transformers' models in training: a recomputed unit, or a part of one that runs again, is called
without one that holds nothing of it, and again with one as it was.

Such a model makes a cache in a training forward too (`use_cache` is on by default). It would keep the keys and values
of each recomputed unit until the backward, which is what recomputing it is to free. transformers leaves it out where it
checkpoints layers itself. A cache that has something of the unit already (a trained prefix) stays, and so does one in
which other layers look for this one's. A unit adds its keys and values to such a one, so a second run is given a copy
of it as it was before the first: it would add them again.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memadvisor.errors import PlanError
from memadvisor.key_value_caches import caches_among, kind_of_caches, own_place


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
        caches = {id(cache) for cache in caches_among(args, kwargs)}
        if not caches:
            return args, kwargs

        def kept(value: Any) -> Any:
            if id(value) not in caches or not _holds_nothing_of(module, value):
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
    place = own_place(module)
    return place is not None and cache.get_seq_length(place) == 0


def with_caches_as_they_were(
    module: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A unit's forward that may be called several times, and the arguments to keep for that.

    What stands for a cache among them has no more than what the cache now holds of the unit: with the cache itself, all
    keys and values that the forward makes would be there until the unit's backward.
    """
    caches = caches_among(args, kwargs)
    if not caches:
        return forward, args, kwargs
    place = own_place(module)
    standing = {id(cache): _AsItWas(cache, place) for cache in caches}
    kept_args = tuple(standing.get(id(value), value) for value in args)
    kept_kwargs = {name: standing.get(id(value), value) for name, value in kwargs.items()}
    return _WithCaches(forward, list(standing.values())), kept_args, kept_kwargs


class _AsItWas:
    """Stands for a cache: the cache itself in the first run, then copies of it as it was before."""

    __slots__ = ("_before", "now")

    def __init__(self, cache: Any, place: int | None) -> None:
        self.now = cache
        self._before = _copied(cache, place)

    def value(self) -> Any:
        # A copy of the copy: there may be a third run.
        return _copied(self._before, None) if self.now is None else self.now


class _WithCaches:
    def __init__(self, forward: Callable[..., Any], standing: list[_AsItWas]) -> None:
        self._forward = forward
        self._standing = standing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_value_of, args))
        kwargs = {name: _value_of(value) for name, value in kwargs.items()}
        for each in self._standing:
            each.now = None
        return self._forward(*args, **kwargs)


def _value_of(value: Any) -> Any:
    return value.value() if isinstance(value, _AsItWas) else value


def _copied(value: Any, place: int | None) -> Any:
    """A cache, its layers, and their lists and dictionaries; the tensors in them are the same, but where layer `place`
    alone is wanted: those of others have their shape and hold nothing."""
    copied = copy.copy(value)
    for name, each in vars(value).items():
        if isinstance(each, list):
            each = [_content(inner, place, place in (None, index)) for index, inner in enumerate(each)]
        elif isinstance(each, dict):
            each = {key: _content(inner, place, place in (None, key)) for key, inner in each.items()}
        else:
            each = _content(each, place, True)
        setattr(copied, name, each)
    return copied


def _content(value: Any, place: int | None, is_wanted: bool) -> Any:
    if not is_wanted and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.new_full((), torch.nan).expand(value.shape)
    if isinstance(value, kind_of_caches()):
        return _copied(value, place)
    if hasattr(value, "lazy_initialization"):  # a layer of a cache
        layer = copy.copy(value)
        for name, each in vars(value).items():
            setattr(layer, name, _content(each, place, is_wanted))
        return layer
    return copy.copy(value) if isinstance(value, list | dict) else value
