"""Every object of a kind that is alive in the process, whoever holds it."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from memadvisor.run.children import children_of
from memadvisor.run.remote import holds_remote


def living(kind: type) -> list[Any]:
    """Instances of `kind` and its subclasses that Python's garbage collector knows; 0.1 us for each of its objects.

    type() tells, and not isinstance(): that would ask objects for their __class__, and a proxy's may run the
    script's code. Nor is an abstract base class asked, as DistributedDataParallel is one, but type's own check: its own
    is several times slower, and refuses types that cannot be hashed.
    """
    is_kind = partial(type.__subclasscheck__, kind)
    return [item for item in gc.get_objects() if is_kind(type(item))]


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
