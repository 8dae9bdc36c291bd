"""Where in a training's first step cuBLAS's workspaces come into being, which torch takes from the allocator and keeps.

torch has one for each thread's handle and stream (CublasHandlePool.cpp), made at the first product there: of the thread
that runs the script in its first forward, of autograd's own in the first backward. So they lie between what these had
allocated by then, and not beside the parameters.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

from memadvisor.run.records import Operator, Storage

_PRODUCTS = "mm"  # in the names of torch's products by cuBLAS: aten::mm, addmm, bmm and baddbmm
_CONVOLUTION = "slow_conv"  # in those of what makes the buffers of one by cuBLAS, where there is no cuDNN


class Piece(Protocol):
    @property
    def start_s(self) -> float: ...


def first_products(
    operators: Iterable[Operator], storages: Iterable[Storage], pieces: Sequence[Piece]
) -> list[tuple[int, float]]:
    """Piece and time of the first product of the step's forward, and of its backward, as far as there are any."""
    storages = sorted(storages, key=lambda row: row.birth_s)
    births = [row.birth_s for row in storages]
    times = [(row.phase, _made_s(row, births)) for row in operators if _PRODUCTS in row.name]
    times += [(row.phase, row.birth_s) for row in storages if _CONVOLUTION in row.operator]
    found = [min((at for phase, at in times if phase == of), default=None) for of in ("forward", "backward")]
    return [place_at(pieces, at) for at in found if at is not None]


def place_at(pieces: Sequence[Piece], time_s: float) -> tuple[int, float]:
    """The piece that a time begins or is in, the first of a time before them all; and that time."""
    return max(0, bisect_right(pieces, time_s, key=lambda piece: piece.start_s) - 1), time_s


def _made_s(product: Operator, births: Sequence[float]) -> float:
    """Just after its result is there, the first that it allocates: only then does it ask for cuBLAS."""
    place = bisect_left(births, product.start_s)
    is_own = place < len(births) and births[place] <= product.end_s
    return math.nextafter(births[place], math.inf) if is_own else product.start_s
