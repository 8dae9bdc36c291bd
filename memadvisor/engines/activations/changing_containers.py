"""Lists, dictionaries and the like that a forward changes in place: attributes of its modules, as they were before it.

What has few elements, none of them a tensor, is copied, so whatever the forward does to it is known. Of a longer list or
dictionary, and of one with tensors, which a copy would keep alive, the length or the keys are known alone: what the forward
has added is not there for a second run, and what it has replaced or taken away is as it left it. Of other sets and deques
nothing is known, and a second run changes them once more.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch

_Entry = tuple[dict[str, Any], str, Any]  # a module's attributes, name, and what a second run finds there
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_MOST_COPIED = 64
_LIGHT = frozenset((type(None), bool, int, float, str))
_KINDS = (list, dict, set, deque)
_WITH_COPY = frozenset((*_KINDS, OrderedDict, defaultdict, Counter))  # whose copies are of the same class


class _Changed(NamedTuple):
    """A container that a forward has changed: where it is, and what is known of it before. `number`: the same of one that
    is in several places."""

    owner: dict[str, Any]
    name: str
    number: int
    kind: type
    seen: Any


class ChangingContainers:
    """Those of some layers' attributes, looked at before a forward and after it."""

    __slots__ = ("_before", "_changed")

    def __init__(self, attributes: Iterable[dict[str, Any]]) -> None:
        self._before = [
            (owner, name, value, seen)
            for owner in attributes
            for name, value in owner.items()
            if isinstance(value, _KINDS)
            and name not in OF_EVERY_MODULE
            and (seen := _seen(value)) is not None
        ]
        self._changed: list[_Changed] = []

    def learn(self) -> None:
        """After the forward: which of them it has changed."""
        self._changed = [
            _Changed(owner, name, id(value), type(value), seen)
            for owner, name, value, seen in self._before
            if owner.get(name) is value and _is_changed(value, seen)
        ]
        self._before = []

    def as_before(self) -> list[_Entry]:
        """What a second run finds in their places, and may change."""
        # What two layers share they share again: one reads what the other has appended.
        made: dict[int, Any] = {}
        for each in self._changed:
            if each.number not in made:
                made[each.number] = _as_before(each.owner.get(each.name), each)
        return [(each.owner, each.name, made[each.number]) for each in self._changed]


def _seen(value: Any) -> Any:
    """A copy; else the keys of a small dictionary, or the length. None for what that does not tell."""
    members = value.values() if isinstance(value, dict) else value
    if len(value) <= _MOST_COPIED and all(type(member) in _LIGHT for member in members):
        if type(value) in _WITH_COPY:
            return value.copy()
        kind = next(kind for kind in _KINDS if isinstance(value, kind))
        return kind(value)
    if isinstance(value, dict) and len(value) <= _MOST_COPIED:
        return frozenset(value)
    return len(value) if isinstance(value, list | dict) else None


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


def _as_before(live: Any, changed: _Changed) -> Any:
    """`live`: what is there now, from which what was added is left out."""
    seen = changed.seen
    if isinstance(seen, int | frozenset):
        return _without_added(live, changed)
    if changed.kind in _WITH_COPY:
        return seen.copy()
    then = _copy_of(live) if type(live) is changed.kind else live
    if then is not live:
        then.clear()
        (then.update if isinstance(then, dict | set) else then.extend)(seen)
    return then


def _without_added(live: Any, changed: _Changed) -> Any:
    then = _copy_of(live) if isinstance(live, changed.kind) else live
    if then is live:
        return live
    if isinstance(then, list):
        del then[changed.seen :]
        return then
    # A dictionary has what was added behind the rest.
    seen = changed.seen
    for key in (
        list(islice(then, seen, None)) if isinstance(seen, int) else [k for k in then if k not in seen]
    ):
        del then[key]
    return then


def _copy_of(container: Any) -> Any:
    """Of the same class; itself where that is one of the script's own that has no copies."""
    try:
        return copy.copy(container)
    except Exception:
        return container
