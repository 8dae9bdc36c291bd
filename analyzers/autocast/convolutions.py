"""Convolutions that are in bfloat16 under autocast, and what oneDNN takes for itself on a CPU while they run.

Copies in its own layout are recorded where float32 is given to it too, and are half as large; float32 does some without it
(slow_convolutions.py), whose columns are not there under autocast. What sums the gradient of filters in bfloat16 is in neither.
So what each takes at its highest instant is measured (calibrate/convolution_workspaces.py), and what is missing is added there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from memadvisor.analyzers.autocast.forward import Forwards
from memadvisor.analyzers.autocast.graph import Call
from memadvisor.analyzers.autocast.recasting import NARROW, Recasting
from memadvisor.analyzers.inner_workspaces import CONVOLUTION, CONVOLUTION_BACKWARD, INSIDE
from memadvisor.analyzers.shapes import dimensions
from memadvisor.analyzers.slow_convolutions import Convolution, recorded_convolutions
from memadvisor.autocast import NarrowConvolution, WorkspacesOf
from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun

_MOST_STEPS = 8  # strides and dilations that are tried


def add_convolutions(
    rank: RankRun, forwards: Forwards, recasting: Recasting, workspaces_of: WorkspacesOf
) -> None:
    """Behind what has halved oneDNN's copies."""
    known, num_threads = recorded_convolutions(rank), rank.process.num_threads
    if num_threads is None:
        return
    found = [*_works(known, forwards)]
    sizes = workspaces_of({work for _, _, work in found})
    inner = sorted((s for s in rank.storages if s.operator.startswith(INSIDE)), key=attrgetter("birth_s"))
    births = [row.birth_s for row in inner]
    for call, one, work in found:
        if work not in sizes:
            continue
        own = inner[bisect_left(births, call.row.start_s) : bisect_right(births, call.row.end_s)]
        if not one.takes_onednn(one.images[0], num_threads):
            recasting.emptied.update(row.storage_id for row in own)
            own = []
        reached_bytes, lives_s = _highest(call, own, recasting)
        if sizes[work] > reached_bytes:
            recasting.add_inside(call.row, call.made or call.reads, sizes[work] - reached_bytes, lives_s)


def _highest(
    call: Call, own: Sequence[Storage], recasting: Recasting
) -> tuple[int, tuple[float, float] | None]:
    """What an operator has beside its results at its highest instant, and when that is."""
    changes: list[tuple[float, int]] = []
    results = [(row, recasting.bytes_in(row, NARROW)) for row in call.made]
    for row, size_bytes in [*results, *((row, row.size_bytes // 2) for row in own)]:
        changes.append((row.birth_s, size_bytes))
        if row.death_s is not None and row.death_s <= call.row.end_s:
            changes.append((row.death_s, -size_bytes))
    level = highest = 0
    lives_s = None
    changes.sort()
    for place, (time_s, delta_bytes) in enumerate(changes):
        level += delta_bytes
        if level > highest:
            following_s = changes[place + 1][0] if place + 1 < len(changes) else call.row.end_s
            highest, lives_s = level, (time_s, (time_s + following_s) / 2)
    return max(0, highest - sum(size for _, size in results)), lives_s if own else None


def _works(
    known: Mapping[tuple[str, str], Convolution | None], forwards: Forwards
) -> Iterator[tuple[Call, Convolution, NarrowConvolution]]:
    for call, of in forwards.narrow_calls((CONVOLUTION,), (CONVOLUTION_BACKWARD,)):
        if of is not None and of.row.name != CONVOLUTION:
            continue
        one = known.get((call.row.module, call.row.shapes or ""))
        work = None if one is None else _work(one)
        if one is None or work is None:
            continue
        if of is None:
            yield call, one, work
        elif (gives := _gives(call, one)) != (False, False):
            yield call, one, replace(work, gives=gives)


def _gives(call: Call, one: Convolution) -> tuple[bool, bool]:
    made = [_padded(dimensions(row.shape), len(one.images)) for row in call.made]
    return one.images in made, one.filters in made


def _padded(shape: tuple[int, ...], num_dimensions: int) -> tuple[int, ...]:
    """With a side of one where it has fewer, as `Convolution` has it."""
    return (*shape[:2], 1, *shape[2:]) if len(shape) == num_dimensions - 1 == 3 else shape


def _work(one: Convolution) -> NarrowConvolution | None:
    """Laid on as sizes allow: next to each other as far as they do, without holes; None where they do not."""
    ends = (one.result, one.images) if one.is_transposed else (one.images, one.result)
    laid = [
        _laid_on(many, few, filters, is_exact=one.is_transposed)
        for many, few, filters in zip(ends[0][2:], ends[1][2:], one.filters[2:], strict=True)
    ]
    if any(side is None for side in laid):
        return None
    strides, paddings, dilations = zip(*(side for side in laid if side is not None), strict=True)
    return NarrowConvolution(
        one.images,
        one.filters,
        one.result,
        strides,
        paddings,
        dilations,
        one.is_transposed,
        one.num_groups,
    )


def _laid_on(many: int, few: int, filters: int, *, is_exact: bool) -> tuple[int, int, int] | None:
    """Stride, padding and dilation by which filters of this length get from `many` places to `few`; `is_exact`: and from
    `few` to `many`."""
    for dilation in range(1, _MOST_STEPS + 1 if filters > 1 else 2):
        reach = dilation * (filters - 1)
        for stride in range(1, _MOST_STEPS + 1):
            for padding in range(reach + 1):
                left = many + 2 * padding - reach - 1
                if left >= 0 and left // stride + 1 == few and not (is_exact and left % stride):
                    return stride, padding, dilation
    return None
