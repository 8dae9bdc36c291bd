"""Shapes as they were recorded."""

from __future__ import annotations

import json
import re
from functools import cache

from memadvisor.run.records import Operator

_SHAPE = re.compile(r"\d+")

Shape = tuple[int, ...]


@cache  # a step's storages have few shapes
def dimensions(shape: str) -> Shape:
    """The whole numbers of a shape as it was recorded: `[8, 128]` or `(8, 128)`."""
    return tuple(int(number) for number in _SHAPE.findall(shape))


def given_shapes(operator: Operator) -> list[tuple[int | None, ...]]:
    """Of what an operator was given, in the order of its arguments; nothing where the record, which may have been damaged,
    cannot be read. Sizes of a jagged tensor may be None."""
    try:
        shapes = [tuple(shape) for shape in json.loads(operator.shapes or "[]")]
    except (ValueError, TypeError, RecursionError):
        return []
    are_sizes = all(size is None or type(size) is int for shape in shapes for size in shape)
    return shapes if are_sizes else []


def given_and_weight(operator: Operator) -> tuple[Shape, Shape] | None:
    """Shapes of a layer's input and weight; None where they are not all known."""
    known = [
        tuple(size for size in shape if size is not None)
        for shape in given_shapes(operator)[:2]
        if None not in shape
    ]
    return (known[0], known[1]) if len(known) == 2 else None
