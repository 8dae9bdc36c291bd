"""Where an ordinary step adds in place and the traced one does not, as modes see its operators.

Where they do, torch makes some sums anew that it else adds to a tensor that nobody else has (`isTensorSubclassLike`): one
tensor more for as long as that takes, and so other blocks of a GPU's allocator. Of these are known

- `linear` of an input that is not contiguous, or has more than three dimensions (aten/src/ATen/native/Linear.cpp):
  `aten::mm`, a view, and `aten::add` of the bias;
- gradients that come to one place of the graph from several (torch/csrc/autograd/input_buffer.cpp): `aten::add`. Those that
  come later are added to the first, if nobody else has it; in the account of a traced step that one ends where the sum begins
  (capture/meeting_gradients.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from memadvisor.analyzers.shapes import dimensions
from memadvisor.run.records import Parameter, Storage

_PRODUCT, _SUM = "aten::mm", "aten::add"


def sums_in_place(rows: Iterable[Storage], parameters: Iterable[Parameter]) -> dict[int, int]:
    """What such sums are added to, by the ids of both."""
    ordered = sorted(rows, key=lambda row: row.birth_s)
    shapes = ((row.name.rpartition(".")[0], dimensions(row.shape)) for row in parameters)
    biases = {(module, shape[0]) for module, shape in shapes if len(shape) == 1}
    recent: dict[tuple[str, str], list[Storage]] = defaultdict(list)  # by dtype and shape
    found: dict[int, int] = {}
    for place, row in enumerate(ordered):
        end_s = ordered[place + 1].birth_s if place + 1 < len(ordered) else math.inf
        if row.operator == _SUM and row.phase == "backward":
            alike = recent[row.dtype, row.shape]
            gone = [other for other in alike if other.death_s == row.birth_s]
            recent[row.dtype, row.shape] = [other for other in alike if _lives_beyond(other, end_s)]
        elif row.operator == _SUM and place:
            gone = [other for other in ordered[place - 1 : place] if _is_product(other, row, biases)]
            gone = [other for other in gone if _goes_with(other, row, end_s)]
        else:
            gone = []
        if gone:
            found[row.storage_id] = gone[0].storage_id
        recent[row.dtype, row.shape].append(row)
    return found


def _goes_with(other: Storage, row: Storage, end_s: float) -> bool:
    """Whether it is gone when the sum is there, and before anything else is."""
    return other.death_s is not None and row.birth_s < other.death_s <= end_s


def _lives_beyond(other: Storage, end_s: float) -> bool:
    return other.death_s is None or other.death_s > end_s


def _is_product(other: Storage, row: Storage, biases: set[tuple[str, int]]) -> bool:
    given, shape = dimensions(other.shape), dimensions(row.shape)
    if not shape or (other.operator, other.module, other.dtype) != (_PRODUCT, row.module, row.dtype):
        return False
    return (
        (row.module, shape[-1]) in biases
        and given[-1:] == shape[-1:]
        and math.prod(given) == math.prod(shape)
    )
