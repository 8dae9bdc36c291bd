"""State that an optimizer of no kind of torch's keeps in objects like those that a library wraps its parameters in (Keras's
variables): lists of them, one for each parameter that it trains, in the order of a list of these.

A run names no library's classes: the wrapper is what has a parameter as an attribute and is no module.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch


def wrapped_states(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of such a state, and the parameter that it is of."""
    known = {id(each) for each in parameters}
    kinds = _wrappers_of(parameters, known)
    if not kinds:
        return
    lists = [
        _wrapped(held, kinds) for held in gc.get_objects() if issubclass(type(held), list) and len(held) > 1
    ]
    of_parameters = {
        tuple(each.shape for each in wrapped): wrapped for wrapped in lists if _is_all_in(wrapped, known)
    }
    for wrapped in lists:
        owners = of_parameters.get(tuple(each.shape for each in wrapped))
        if owners is not None and known.isdisjoint(map(id, wrapped)):
            yield from zip(wrapped, owners, strict=True)


def _wrappers_of(parameters: Sequence[torch.Tensor], known: set[int]) -> dict[type, str]:
    """The classes of wrappers, with the name under which they have the parameter."""
    kinds: dict[type, str] = {}
    held_by = gc.get_referrers(*parameters) if parameters else []
    # Python hands out an object's dictionary where somebody has asked for it, and else the object.
    dictionaries = {id(each) for each in held_by if type(each) is dict}
    inside = [each for each in held_by if type(each) is dict and any(type(key) is str for key in each)]
    objects = [each for each in held_by if id(each) not in dictionaries]
    objects += gc.get_referrers(*inside) if inside else []
    for each in objects:
        kind = type(each)
        if issubclass(kind, (torch.nn.Module, torch.Tensor, type)) or not hasattr(kind, "__dict__"):
            continue
        try:
            own = object.__getattribute__(each, "__dict__")
        except AttributeError:
            continue
        name = next((key for key, value in own.items() if id(value) in known), None)
        if name is not None:
            kinds[kind] = name
    return kinds


def _wrapped(held: list[object], kinds: dict[type, str]) -> list[torch.Tensor]:
    """The tensors in a list of wrappers; none where it has anything else."""
    found: list[torch.Tensor] = []
    for each in list.__iter__(held):
        name = kinds.get(type(each))
        value = None if name is None else object.__getattribute__(each, "__dict__").get(name)
        if not isinstance(value, torch.Tensor):
            return []
        found.append(value)
    return found


def _is_all_in(tensors: list[torch.Tensor], known: set[int]) -> bool:
    return bool(tensors) and all(id(each) in known for each in tensors)
