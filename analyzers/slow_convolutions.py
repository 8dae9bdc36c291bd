"""Convolutions that torch computes on a CPU by oneDNN with the recorded micro-batch, and by its own algorithm with a smaller
one: a product of matrices, whose one factor are copies of what each place of the result sees (its columns).

Which it takes is torch's rule for float32 (aten/src/ATen/native/Convolution.cpp, `ConvParams::use_mkldnn`). Known here are
those without groups over one or two dimensions; what shapes alone do not tell (strides, what is transposed) is read from the
recorded FLOPs, which go with the places of the result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Set
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from operator import attrgetter

from memadvisor.analyzers.inner_workspaces import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    FLOAT_BYTES,
    INSIDE,
    Shape,
    given_and_weight,
)
from memadvisor.run.records import Operator, Storage
from memadvisor.run.run import RankRun

_FEW_SAMPLES, _FEW_ELEMENTS = 16, 20_480


@dataclass(frozen=True, slots=True)
class Convolution:
    """Without groups. `images`: (samples, channels, height, width) of what it is given; `filters`: (output channels, channels,
    height, width); `num_places`: of the result, for each sample."""

    images: Shape
    filters: Shape
    num_places: int

    @property
    def is_pointwise(self) -> bool:
        """Filters see one place each, and there are as many as places."""
        return self.filters[2:] == (1, 1) and self.num_places == prod(self.images[2:])

    def takes_onednn(self, num_samples: int, num_threads: int) -> bool:
        is_any_size = num_samples >= _FEW_SAMPLES or self.filters[2:] != (1, 1) or num_threads > 1
        is_worth_it = num_samples > 1 or min(self.filters[2:]) > 3
        is_large = num_samples * prod(self.images[1:]) > _FEW_ELEMENTS
        is_strided = self.filters[2:] == (1, 1) and self.num_places < prod(self.images[2:])
        return (is_any_size or is_strided) and (is_worth_it or is_large)

    def columns_bytes(self, num_samples: int) -> int:
        """Of torch's own algorithm, in a forward as in a backward; a pointwise one works on what it is given."""
        if self.is_pointwise:
            return 0
        return num_samples * prod(self.filters[1:]) * self.num_places * FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class _Turned:
    """An operator that takes torch's own algorithm with the smaller micro-batch."""

    operator: Operator
    columns_bytes: int


def slow_workspaces(rank: RankRun, divisor: int | Fraction, sizes: Set[int]) -> dict[int, int]:
    """New sizes, by storage, of what these convolutions made for themselves, with micro-batches of 1/divisor of their size:
    columns are where oneDNN's last copy was, and its other copies are not. What oneDNN made no copy for gets no columns.

    `sizes`: which dimensions shrink with the micro-batch.
    """
    rows = sorted(
        (row for row in rank.storages if row.operator.startswith(INSIDE)), key=attrgetter("birth_s")
    )
    births = [row.birth_s for row in rows]
    found: dict[int, int] = {}
    for turned in _turned(rank, divisor, sizes):
        start_s, end_s = turned.operator.start_s, turned.operator.end_s
        own = rows[bisect_left(births, start_s) : bisect_right(births, end_s)]
        found |= {row.storage_id: 0 for row in own}
        if own:
            found[max(own, key=_death_s).storage_id] = turned.columns_bytes
    return found


def slow_modules(rank: RankRun, divisor: int | Fraction, sizes: Set[int]) -> set[str]:
    """Those whose convolutions take another algorithm with such micro-batches."""
    return {turned.operator.module for turned in _turned(rank, divisor, sizes)}


def _death_s(row: Storage) -> float:
    return float("inf") if row.death_s is None else row.death_s


def _turned(rank: RankRun, divisor: int | Fraction, sizes: Set[int]) -> Iterable[_Turned]:
    num_threads = rank.process.num_threads
    if not rank.process.device.startswith("cpu") or num_threads is None:
        return
    results = (row for row in rank.storages if row.operator == CONVOLUTION and row.dtype == "float32")
    births = sorted(row.birth_s for row in results)
    known: dict[tuple[str, str], Convolution | None] = {}
    for operator in rank.operators:
        if operator.name != CONVOLUTION or operator.shapes is None:
            continue
        if bisect_left(births, operator.start_s) < bisect_right(births, operator.end_s):
            key = operator.module, operator.shapes
            one = _convolution(operator)
            known[key] = one if known.get(key, one) == one else None
    for operator in rank.operators:
        if operator.name not in (CONVOLUTION, CONVOLUTION_BACKWARD):
            continue
        convolution = known.get((operator.module, operator.shapes or ""))
        if convolution is None or convolution.images[0] not in sizes or convolution.images[0] % divisor:
            continue
        whole, part = convolution.images[0], int(convolution.images[0] / divisor)
        if convolution.takes_onednn(whole, num_threads) and not convolution.takes_onednn(part, num_threads):
            yield _Turned(operator, convolution.columns_bytes(part))


def _convolution(operator: Operator) -> Convolution | None:
    shapes = given_and_weight(operator)
    if shapes is None or len(shapes[0]) not in (3, 4) or len(shapes[0]) != len(shapes[1]):
        return None
    images, filters = shapes
    if len(images) == 3:
        images, filters = (*images[:2], 1, images[2]), (*filters[:2], 1, filters[2])
    a_place_flops = 2 * images[0] * prod(filters)
    is_grouped = images[1] != filters[1]
    if is_grouped or not a_place_flops or operator.executed_flops % a_place_flops:
        return None
    return Convolution(images, filters, operator.executed_flops // a_place_flops)
