"""Lists, dictionaries and the like that a forward changes in place: attributes of its modules, as they were before it.

What has few elements, none of them a tensor, is copied, so whatever the forward does to it is known. Of a longer list or
dictionary, and of one with tensors, which a copy would keep alive, the length or the keys are known alone: what the forward
has added is not there for a second run, and what it has replaced or taken away is as it left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

_Entry = tuple[dict[str, Any], str, Any]  # a module's attributes, name, and what a second run finds there
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_MOST_COPIED = 64
_LIGHT = frozenset((type(None), bool, int, float, str))


class ChangingContainers:
    """Those of some layers' attributes, looked at before a forward and after it."""

    __slots__ = ("_before", "_changed")

    def __init__(self, attributes: Iterable[dict[str, Any]]) -> None:
        self._before = [
            (owner, name, value, seen)
            for owner in attributes
            for name, value in owner.items()
            if isinstance(value, list | dict | set | deque)
            and name not in OF_EVERY_MODULE
            and (seen := _seen(value)) is not None
        ]
        self._changed: list[tuple[dict[str, Any], str, Any]] = []

    def learn(self) -> None:
        """After the forward: which of them it has changed."""
        self._changed = [
            (owner, name, seen)
            for owner, name, value, seen in self._before
            if owner.get(name) is value and _is_changed(value, seen)
        ]
        self._before = []

    def as_before(self) -> list[_Entry]:
        """What a second run finds in their places, and may change."""
        return [(owner, name, _as_before(owner.get(name), seen)) for owner, name, seen in self._changed]


def _seen(value: Any) -> Any:
    """A copy; else the length of a list or the keys of a dictionary. None for what neither tells."""
    members = value.values() if isinstance(value, dict) else value
    if len(value) <= _MOST_COPIED and all(type(member) in _LIGHT for member in members):
        return value.copy()
    if isinstance(value, list):
        return len(value)
    return frozenset(value) if isinstance(value, dict) and len(value) <= _MOST_COPIED else None


def _is_changed(value: Any, seen: Any) -> bool:
    if isinstance(seen, int):
        return len(value) != seen
    if isinstance(seen, frozenset | set):
        return set(value) != seen
    if len(value) != len(seen):
        return True
    if isinstance(seen, dict):
        return any(value.get(key, seen) is not old for key, old in seen.items())
    return any(new is not old for new, old in zip(value, seen, strict=True))


def _as_before(live: Any, seen: Any) -> Any:
    """`live`: what is there now, from which what was added is left out."""
    if isinstance(seen, int):
        return live[:seen] if isinstance(live, list) else live
    if not isinstance(seen, frozenset):
        return seen.copy()
    then = live.copy() if isinstance(live, dict) else live
    for key in live if then is not live else ():
        if key not in seen:
            del then[key]
    return then
