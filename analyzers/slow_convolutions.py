"""Convolutions that torch computes on a CPU by oneDNN with the recorded micro-batch, and by its own algorithm with a smaller
one: a product of matrices, whose one factor are copies of what each place of the result sees (its columns).

Which it takes is torch's rule for float32 (aten/src/ATen/native/Convolution.cpp, `ConvParams::use_mkldnn`), over one to three
dimensions. Whether one is transposed is read from the shapes of what it is given, of its filters and of its result, and from
the recorded FLOPs, which go with the places that its filters are laid on. What those with groups make is not known here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Set
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from operator import attrgetter

from memadvisor.analyzers.inner_workspaces import CONVOLUTION, CONVOLUTION_BACKWARD, FLOAT_BYTES, INSIDE
from memadvisor.analyzers.shapes import Shape, dimensions, given_and_weight
from memadvisor.run.records import Operator, Storage
from memadvisor.run.run import RankRun

_FEW_SAMPLES, _FEW_ELEMENTS = 16, 20_480
_IN_ORDER = f"{INSIDE}aten::clone"  # of what does not lie as either algorithm takes it


@dataclass(frozen=True, slots=True)
class Convolution:
    """Of two or three sides. `images`, which it is given, and `result`: (samples, channels, sides); `filters`: (output
    channels, channels of a group, sides), or transposed (channels, output channels of a group, sides)."""

    images: Shape
    filters: Shape
    result: Shape
    is_transposed: bool = False

    @property
    def num_groups(self) -> int:
        return (self.result if self.is_transposed else self.images)[1] // self.filters[1]

    def takes_onednn(self, num_samples: int, num_threads: int) -> bool:
        last = self.filters[-2:]
        is_any_size = num_samples >= _FEW_SAMPLES or last != (1, 1) or num_threads > 1
        is_worth_it = num_samples > 1 or min(last) > 3 or self.num_groups > 1
        is_large = num_samples * prod(self.images[1:4]) > _FEW_ELEMENTS
        return (is_any_size or self._is_spread) and (is_worth_it or is_large)

    @property
    def _is_spread(self) -> bool:
        """Filters are laid on every second place or fewer, or what they see is so far apart."""
        ends = (self.images, self.result) if self.is_transposed else (self.result, self.images)
        sides = zip(ends[0][2:], self.filters[2:], ends[1][2:], strict=True)
        return any(few + filters - 1 < many for few, filters, many in sides)

    @property
    def _is_pointwise(self) -> bool:
        """Filters see one place each, and there are as many as places."""
        return set(self.filters[2:]) == {1} and self.images[2:] == self.result[2:]

    def columns_bytes(self, num_samples: int, *, in_backward: bool) -> int:
        """Of torch's own algorithm without groups. A pointwise one works on what it is given, but over three dimensions in
        a backward, and transposed in a forward."""
        has_columns = in_backward and len(self.images) > 4
        if self.is_transposed:
            has_columns = not in_backward
        if self._is_pointwise and not has_columns:
            return 0
        laid_on = (self.images if self.is_transposed else self.result)[2:]
        # Over three dimensions a transposed forward has a one for each place of the result beside them.
        has_ones = self.is_transposed and not in_backward and len(self.images) > 4
        ones = prod(self.result[2:]) if has_ones else 0
        return (num_samples * prod(self.filters[1:]) * prod(laid_on) + ones) * FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class _Turned:
    """An operator that takes torch's own algorithm with the smaller micro-batch, of so many samples."""

    operator: Operator
    convolution: Convolution
    num_samples: int

    @property
    def columns_bytes(self) -> int:
        in_backward = self.operator.name == CONVOLUTION_BACKWARD
        return self.convolution.columns_bytes(self.num_samples, in_backward=in_backward)


def slow_workspaces(rank: RankRun, divisor: int | Fraction, sizes: Set[int]) -> dict[int, int]:
    """New sizes, by storage, of what these convolutions made for themselves, with micro-batches of 1/divisor of their size:
    columns are where the last copy in oneDNN's layout was, and others are not. What oneDNN made no copy for gets no columns.

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
        own = [row for row in own if not _is_made_again(row, own, turned.num_samples)]
        if own and turned.convolution.num_groups == 1:
            found |= {row.storage_id: 0 for row in own}
            found[max(own, key=_death_s).storage_id] = turned.columns_bytes
    return found


def _is_made_again(row: Storage, own: Iterable[Storage], num_samples: int) -> bool:
    """Whether torch's own algorithm too puts in order what lies otherwise: not channels of a single sample, a slice of which
    has no gaps. They are last (channels_last) where oneDNN copies no samples."""
    if row.operator != _IN_ORDER:
        return False
    copies = (other for other in own if other.operator != _IN_ORDER)
    return num_samples > 1 or not any(copy.size_bytes >= row.size_bytes for copy in copies)


def slow_modules(rank: RankRun, divisor: int | Fraction, sizes: Set[int]) -> set[str]:
    """Those whose convolutions take another algorithm with such micro-batches."""
    return {turned.operator.module for turned in _turned(rank, divisor, sizes)}


def _death_s(row: Storage) -> float:
    return float("inf") if row.death_s is None else row.death_s


def _turned(rank: RankRun, divisor: int | Fraction, sizes: Set[int]) -> Iterable[_Turned]:
    num_threads = rank.process.num_threads
    if not rank.process.device.startswith("cpu") or num_threads is None:
        return
    known = recorded_convolutions(rank)
    for operator in rank.operators:
        if operator.name not in (CONVOLUTION, CONVOLUTION_BACKWARD):
            continue
        convolution = known.get((operator.module, operator.shapes or ""))
        if convolution is None or convolution.images[0] not in sizes or convolution.images[0] % divisor:
            continue
        whole, part = convolution.images[0], int(convolution.images[0] / divisor)
        if convolution.takes_onednn(whole, num_threads) and not convolution.takes_onednn(part, num_threads):
            yield _Turned(operator, convolution, part)


def recorded_convolutions(rank: RankRun) -> dict[tuple[str, str], Convolution | None]:
    """Those in float32, by module and recorded shapes; None where two that differ have the same."""
    results = [row for row in rank.storages if row.operator == CONVOLUTION and row.dtype == "float32"]
    results.sort(key=attrgetter("birth_s"))
    births = [row.birth_s for row in results]
    known: dict[tuple[str, str], Convolution | None] = {}
    for operator in rank.operators:
        if operator.name != CONVOLUTION or operator.shapes is None:
            continue
        first = bisect_left(births, operator.start_s)
        if first < bisect_right(births, operator.end_s):
            key = operator.module, operator.shapes
            one = _convolution(operator, dimensions(results[first].shape))
            known[key] = one if known.get(key, one) == one else None
    return known


def _convolution(operator: Operator, result: Shape) -> Convolution | None:
    """None where the shapes are those of none. Where they may be of both kinds, and so may the FLOPs, columns are as large."""
    shapes = given_and_weight(operator)
    if (
        shapes is None
        or len(shapes[0]) not in (3, 4, 5)
        or not len(shapes[0]) == len(shapes[1]) == len(result)
    ):
        return None
    images, filters, result = (
        shape if len(shape) > 3 else (*shape[:2], 1, *shape[2:]) for shape in (*shapes, result)
    )
    for is_transposed, given, made in ((False, images, result), (True, result, images)):
        flops = 2 * images[0] * prod(filters) * prod(made[2:])
        if made[1] == filters[0] and given[1] % filters[1] == 0 and flops == operator.executed_flops:
            return Convolution(images, filters, result, is_transposed)
    return None
