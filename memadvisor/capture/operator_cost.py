"""What one operator costs: arithmetic and memory traffic. It never raises into the training.

It runs at every operator of a traced step, so what a schema says is looked up once, and arithmetic that follows
from shapes alone is counted once for each combination of shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memadvisor.capture.arguments import Arguments, Arithmetic
from memadvisor.capture.flops import NO_ARITHMETIC, depends_on_shapes_alone, flop_counter
from memadvisor.capture.tensor_storage import NO_TENSORS, PLAIN_TENSORS
from memadvisor.capture.traffic import Rule, moved_bytes, rule_of

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


# FLOPs that were executed and those that the model needs, the shapes they were counted from, and the bytes that must
# be read and written; None where not known. A plain tuple: one with names takes as long to make as all the rest.
OperatorCost = tuple[int, int, str, int | None, int | None]


class _Known(NamedTuple):
    """What is the same for all calls of an operator. `func` keeps it alive, for it is found by its id."""

    func: Any
    count: Any  # None: no matrix arithmetic
    by_shapes: dict[Any, Arithmetic] | None  # None: not determined by shapes
    rule: Rule | None  # None: a collective, whose traffic is the network's and recorded as such


_known: dict[int, _Known] = {}


def operator_cost(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, uncounted: set[str]
) -> OperatorCost:
    """An operator whose FLOPs cannot be worked out counts 0 and is named in `uncounted`."""
    known = _known.get(id(func)) or _learn(func)
    arithmetic = NO_ARITHMETIC
    if known.count is not None:
        try:
            arithmetic = _arithmetic(known, args, kwargs, out)
        except Exception:
            uncounted.add(f"{func.namespace}::{func._opname}")
    if known.rule is None:
        return (*arithmetic, None, None)
    try:
        return (*arithmetic, *moved_bytes(known.rule, args, kwargs, out))
    except Exception:  # a tensor that does not tell its size
        return (*arithmetic, None, None)


def _learn(func: Any) -> _Known:
    known = _Known(
        func=func,
        count=flop_counter(func),
        by_shapes={} if depends_on_shapes_alone(func) else None,
        rule=None if func.namespace in _COLLECTIVES else rule_of(func),
    )
    _known[id(func)] = known
    return known


def _arithmetic(known: _Known, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Arithmetic:
    key = None if known.by_shapes is None or kwargs else _shapes_key(args)
    if known.by_shapes is None or key is None:
        counted: Arithmetic = known.count(Arguments(known.func, args, kwargs, out))
        return counted
    found = known.by_shapes.get(key)
    if found is None:
        found = known.by_shapes[key] = known.count(Arguments(known.func, args, kwargs, out))
    return found


def _shapes_key(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Shapes and numbers of a call; None where they do not say all (sparse and jagged tensors, lists of them)."""
    key: list[Any] = []
    for value in args:
        kind = type(value)
        if kind in NO_TENSORS:
            key.append(value)
        elif kind in PLAIN_TENSORS or isinstance(value, torch.Tensor):
            if kind not in PLAIN_TENSORS or value.layout != torch.strided or value.is_nested:
                return None
            key.append(value.shape)
        elif isinstance(value, (list, tuple)):
            if any(isinstance(item, torch.Tensor) for item in value):
                return None
            key.append(tuple(value))
        else:
            key.append(value)
    return tuple(key)
