"""Which modules of a model others hold in plain attributes, beside the one that has them as a child.

A block whose weights several layers share may be registered once, and be called from wherever it is held: `[block] * 6`, or
`layer.shared = [block]` in each layer. Who is inside of a module and holds it knows its owner, and calls nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from memadvisor.run.children import modules_of

_PLACES = 2
_MOST_ITEMS = 1024  # of a list that is looked through


def shared_modules(root: Any) -> frozenset[int]:
    """By id, those that are held in two places or more."""
    modules = list(modules_of(root))
    ids = {id(module) for module in modules}
    holders: dict[int, list[int]] = {}
    counts: Counter[int] = Counter()
    for module in modules:
        for held in _held(module):
            if id(held) in ids and held is not module:
                counts[id(held)] += 1
                holders.setdefault(id(held), []).append(id(module))
    found = set()
    for module in modules:
        if counts[id(module)] >= _PLACES:
            own = {id(each) for each in modules_of(module)}
            if sum(holder not in own for holder in holders[id(module)]) >= _PLACES:
                found.add(id(module))
    return frozenset(found)


def _held(module: Any) -> Iterator[Any]:
    """What may be modules in its plain attributes, and in plain lists and dicts there; all that torch has itself is elsewhere."""
    for name, value in vars(module).items():
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        if type(value) in (list, tuple, dict):
            if len(value) <= _MOST_ITEMS:
                yield from value.values() if type(value) is dict else value
        else:
            yield value
