"""Modules inside a module, asked past the modules' own methods, which may run anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def children_of(module: Any) -> list[Any]:
    """Those directly inside; none of one that is being made."""
    return [child for child in vars(module).get("_modules", {}).values() if child is not None]


def modules_of(root: Any) -> Iterator[Any]:
    """A module and all in it, once each, in the order of torch's `modules`."""
    left, seen = [root], set()
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            left += reversed(children_of(module))
