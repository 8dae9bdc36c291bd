"""Which part of a storage an operator is given: all of it, or a tensor on a part, as queries are of a product for all three."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memadvisor.analyzers.autocast.graph import Call
from memadvisor.analyzers.shapes import dimensions, given_shapes
from memadvisor.run.records import Storage

_ELEMENTWISE = ("aten::mul", "aten::div")


def operand_shape(call: Call, row: Storage, saved: Sequence[str]) -> str:
    """The shape of the tensor on this storage that a call was given, where anything tells it; else "", the whole.

    `saved`: the shapes of what autograd keeps of it for this call.
    """
    if saved:
        return max(saved, key=_elements)
    if call.row.name in _ELEMENTWISE and call.made:
        return min(row.shape, call.made[0].shape, key=_elements)
    given = [
        [size for size in shape if size is not None] for shape in given_shapes(call.row) if None not in shape
    ]
    whole = _elements(row.shape)
    if not given or whole in {math.prod(shape) for shape in given}:
        return ""
    others = {_elements(other.shape) for other in call.reads if other is not row}
    parts = [shape for shape in given if math.prod(shape) < whole and math.prod(shape) not in others]
    return str(max(parts, key=math.prod)) if parts else ""


def _elements(shape: str) -> int:
    return math.prod(dimensions(shape))
