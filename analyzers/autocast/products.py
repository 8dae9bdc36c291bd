"""Products of matrices that are in bfloat16 under autocast, and what they take for themselves while they run.

On a CPU torch gives such products to oneDNN, which lays factors out anew in memory of its own; products of float32, which
were recorded, take none. How much is the library's, the processor's and the number of threads' choice: it is measured
(calibrate/product_workspaces.py).
"""

from __future__ import annotations

from math import prod

from memadvisor.analyzers.autocast.forward import Forwards
from memadvisor.analyzers.autocast.graph import Call
from memadvisor.analyzers.autocast.recasting import Recasting
from memadvisor.analyzers.shapes import Shape, dimensions, given_and_weight
from memadvisor.autocast import NarrowProduct, WorkspacesOf

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm")


def add_workspaces(forwards: Forwards, recasting: Recasting, workspaces_of: WorkspacesOf) -> None:
    found = [(call, _product(call, of)) for call, of in forwards.narrow_calls(_PRODUCTS, _PRODUCTS)]
    sizes = workspaces_of({product for _, product in found if product is not None})
    for call, product in found:
        if product is not None and (size_bytes := sizes.get(product, 0)):
            recasting.add_inside(call.row, call.made or call.reads, size_bytes)


def _product(call: Call, of: Call | None) -> NarrowProduct | None:
    factors = given_and_weight(call.row)
    if factors is None or {len(factor) for factor in factors} - {2, 3}:
        return None
    left, right = factors
    return NarrowProduct(left, right, _is_turned(call, of, left))


def _is_turned(call: Call, of: Call | None, left: Shape) -> bool:
    """Whether the first factor lies by columns: its storage is recorded the other way round. Where sizes do not tell, so does
    that of the gradient of a second factor, for which that factor is not read."""
    rows, columns = left[-2:]
    last = {
        shape[-1]
        for row in call.reads
        if (shape := dimensions(row.shape)) and prod(shape) == prod(left) and shape[-1] in (rows, columns)
    }
    if rows != columns and len(last) == 1:
        return last == {rows}
    if of is None or len(of.reads) < 2:
        return of is not None
    first, second = (row.storage_id for row in of.reads[-2:])
    return first == second or second not in {row.storage_id for row in call.reads}
