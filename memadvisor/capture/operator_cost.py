"""What one operator costs: arithmetic and memory traffic. It never raises into the training.

It runs at every operator of a traced step, so what a schema says is looked up once, and arithmetic that follows
from shapes alone is counted once for each combination of shapes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch

from memadvisor.capture.arguments import Arguments, Arithmetic
from memadvisor.capture.flops import NO_ARITHMETIC, depends_on_shapes_alone, flop_counter
from memadvisor.capture.tensor_storage import NO_TENSORS, PLAIN_TENSORS
from memadvisor.capture.traffic import Rule, moved_bytes, rule_of

_STRIDED, _shape_of = torch.strided, attrgetter("shape")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


class CountedBy(NamedTuple):
    """What is the same for all calls of an operator."""

    func: Any
    count: Any  # None: no matrix arithmetic
    by_shapes: dict[Any, Arithmetic] | None  # None: not determined by shapes
    rule: Rule | None  # None: a collective, whose traffic is the network's and recorded as such


def counted_by(func: Any) -> CountedBy:
    return CountedBy(
        func=func,
        count=flop_counter(func),
        by_shapes={} if depends_on_shapes_alone(func) else None,
        rule=None if func.namespace in _COLLECTIVES else rule_of(func),
    )


def known_product(products: dict[Any, Arithmetic], tensors: tuple[Any, ...]) -> Arithmetic | None:
    """What was counted of these shapes before."""
    try:
        return products.get(tuple(map(_shape_of, tensors)))
    except RuntimeError:  # nested, of strided ones: they have no shape
        return None


def arithmetic_of(
    known: CountedBy, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any, uncounted: set[str]
) -> Arithmetic:
    """FLOPs of an operator that has matrix arithmetic; 0, and its name in `uncounted`, where they cannot be had."""
    try:
        key = None if known.by_shapes is None else _shapes_key(args, kwargs)
        if known.by_shapes is None or key is None:
            counted: Arithmetic = known.count(Arguments(known.func, args, kwargs or {}, out))
            return counted
        found = known.by_shapes.get(key)
        if found is None:
            found = known.by_shapes[key] = known.count(Arguments(known.func, args, kwargs or {}, out))
        return found
    except Exception:
        uncounted.add(f"{known.func.namespace}::{known.func._opname}")
        return NO_ARITHMETIC


def traffic_of(
    known: CountedBy, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[int | None, int | None]:
    """Bytes that must be read and written; None where not known."""
    if known.rule is None:
        return None, None
    try:
        return moved_bytes(known.rule, args, kwargs, out)
    except Exception:  # a tensor that does not tell its size
        return None, None


def _shapes_key(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """Shapes and numbers of a call; None where they do not say all (sparse and jagged tensors, lists of them)."""
    key: list[Any] = []
    for value in args:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            if value.layout is not _STRIDED or value.is_nested:
                return None
            key.append(value.shape)
        elif kind in NO_TENSORS:
            key.append(value)
        elif kind is list and not any(isinstance(item, torch.Tensor) for item in value):
            key.append(tuple(value))
        else:
            return None
    for name, value in (kwargs or {}).items():
        if type(value) not in NO_TENSORS:
            return None
        key += (name, value)
    return tuple(key)
