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


def given_and_weight(operator: Operator) -> tuple[Shape, Shape] | None:
    """Shapes of a layer's input and weight; None where they are not all known."""
    given, weight = (tuple(shape) for shape in json.loads(operator.shapes or "")[:2])
    return None if None in given + weight else (given, weight)
