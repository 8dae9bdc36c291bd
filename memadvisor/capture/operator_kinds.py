"""What the label layer must know of an operator, learnt from its schema at its first call.

Most calls of a training step are views, changes of the first argument in place, and functions from tensors to tensors.
What they read and write is plain from the schema and a glance at their tensors (labels.py does both in one pass). All
else takes the general way: lists of tensors, random numbers, collectives, look-ups, partial updates, other libraries'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from memadvisor.capture.arguments import Arithmetic
from memadvisor.capture.operator_cost import CountedBy, counted_by
from memadvisor.capture.script_shards import NAMESPACE
from memadvisor.operator_calls import dropout_position, may_draw, operator_name

NAMESPACES_OF_COLLECTIVES = ("c10d", "_c10d_functional")
_ADD = torch.ops.aten.add.Tensor
_NUMBERS = frozenset(
    (
        *("IntType", "FloatType", "BoolType", "ComplexType", "NumberType", "StringType", "NoneType", "DeviceObjType"),
        *("SymIntType", "SymFloatType", "SymBoolType", "GeneratorType", "LayoutType", "ScalarTypeType"),
        *("MemoryFormatType", "QSchemeType", "StreamObjType"),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """What is the same for all calls of an operator. `func` keeps it alive, for it is found by its id."""

    func: Any
    call: Callable[..., Any]  # what `func` does when it is called
    name: str
    counted_by: CountedBy
    has_arithmetic: bool
    # Its arithmetic, where the shapes of its arguments, all tensors, tell it.
    products: dict[Any, Arithmetic] | None
    is_random: bool  # it may draw random numbers
    dropout_position: int | None
    is_general: bool
    # Of one that is not general: only so many of its first arguments may hold tensors, and none in lists.
    num_examined: int
    keywords_may_hold: bool  # tensors, too
    is_view: bool  # what it returns shares the storage of its only tensor
    is_in_place: bool  # it changes and returns its first argument; else it changes none
    moves: bool  # it reads and writes its tensors' bytes
    may_meet: bool  # autograd's engine adds gradients with it (meeting_gradients.py)
    # Of a general one:
    is_collective: bool
    is_sharding: bool  # of FSDP2


kinds: dict[int, OperatorKind] = {}  # by the id of the operator


def learn(func: OpOverload[..., Any]) -> OperatorKind:
    counted = counted_by(func)
    rule, arguments = counted.rule, func._schema.arguments
    holders = [n for n, argument in enumerate(arguments) if _may_hold(argument.type)]
    positional = [n for n, argument in enumerate(arguments) if not argument.kwarg_only]
    is_view = _is_view(func, holders)
    is_general = (
        func.namespace != "aten"
        or rule is None
        or not all(_is_one(arguments[n].type) for n in holders)
        or not (is_view or rule.is_plain or rule.changes_first)
        or "resize" in func._opname
        or func._opname.startswith("set_")  # as by a resize, a tensor has another storage afterwards
    )
    known = kinds[id(func)] = OperatorKind(
        func=func,
        call=func._op if type(func) is OpOverload else func,  # one Python frame less
        name=operator_name(func),
        counted_by=counted,
        has_arithmetic=counted.count is not None,
        products=counted.by_shapes if holders == positional else None,
        is_general=is_general,
        num_examined=max((n for n in holders if not arguments[n].kwarg_only), default=-1) + 1,
        keywords_may_hold=any(arguments[n].kwarg_only for n in holders),
        is_view=is_view,
        is_in_place=rule is not None and rule.changes_first,
        moves=rule is not None and rule.moves,
        may_meet=func is _ADD,
        is_collective=func.namespace in NAMESPACES_OF_COLLECTIVES,
        is_sharding=func.namespace == NAMESPACE,
        is_random=may_draw(func),
        dropout_position=dropout_position(func),
    )
    return known


def _is_view(func: OpOverload[..., Any], holders: list[int]) -> bool:
    """Whether each result shares the storage of the first argument, the only tensor.

    An operator that torch composes of others may return a copy, though its schema names an alias (`reshape`).
    """
    returns = func._schema.returns
    return (
        holders == [0]
        and bool(returns)
        and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )


def _may_hold(kind: Any) -> bool:
    """Whether an argument of this type may be a tensor, or hold some."""
    if kind.kind() in ("OptionalType", "ListType"):
        return _may_hold(kind.getElementType())
    return kind.kind() not in _NUMBERS


def _is_one(kind: Any) -> bool:
    """Whether an argument of this type is one tensor, or none."""
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return bool(kind.kind() == "TensorType")
