"""Every object of a kind that is alive in the process, whoever holds it."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from memadvisor.run.children import children_of
from memadvisor.run.remote import holds_remote


class _Look(threading.local):
    """What a thread's one look has seen: everything that was alive at its first question, and what was asked for of that."""

    is_open = False
    objects: list[Any] | None = None

    def __init__(self) -> None:
        self.asked: dict[type, list[Any]] = {}


_look = _Look()


@contextlib.contextmanager
def one_look() -> Iterator[None]:
    """Inside of this all questions of this thread are answered from one look through all objects, at the first one.
    Meanwhile they stay alive."""
    if _look.is_open:
        yield
        return
    _look.is_open = True
    try:
        yield
    finally:
        _look.is_open, _look.objects = False, None
        _look.asked.clear()


def all_objects() -> Sequence[Any]:
    """Whatever Python's garbage collector knows."""
    if not _look.is_open:
        return gc.get_objects()
    if _look.objects is None:
        _look.objects = gc.get_objects()
    return _look.objects


def living(kind: type) -> list[Any]:
    """Instances of `kind` and its subclasses that Python's garbage collector knows; 0.1 us for each of its objects.

    type() tells, and not isinstance(): that would ask objects for their __class__, and a proxy's may run the
    script's code. Nor is an abstract base class asked, as DistributedDataParallel is one, but type's own check: its own
    is several times slower, and refuses types that cannot be hashed.
    """
    if not _look.is_open:
        return _of_kind(kind, all_objects())
    if kind not in _look.asked:
        around = next(
            (found for one, found in _look.asked.items() if type.__subclasscheck__(one, kind)), None
        )
        _look.asked[kind] = _of_kind(kind, all_objects() if around is None else around)
    return list(_look.asked[kind])


def _of_kind(kind: type, objects: Sequence[Any]) -> list[Any]:
    is_kind = partial(type.__subclasscheck__, kind)
    return [item for item in objects if is_kind(type(item))]


def living_modules(kind: type) -> list[Any]:
    """The same of torch.nn.Module, without those that nobody may ask for what is inside: what is being made, and what
    holds modules of other processes."""
    made = [module for module in living(kind) if {"_modules", "_parameters"} <= vars(module).keys()]
    return [module for module in made if not holds_remote(module)]


def outermost_modules(kind: type) -> list[Any]:
    """Of these, those that are in no other."""
    modules = living_modules(kind)
    inner = {id(child) for module in modules for child in children_of(module)}
    return [module for module in modules if id(module) not in inner]
