"""Every allocation of the traced step with what a plan changes of it, for playing the sequence again."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from memadvisor.analyzers.first_products import first_products, place_at
from memadvisor.analyzers.movable import begun_with, cached_unit
from memadvisor.analyzers.placement import Passes, Placed
from memadvisor.analyzers.requested_bytes import requests
from memadvisor.analyzers.sums_in_place import sums_in_place
from memadvisor.cost.saved import SavedStorages
from memadvisor.cost.step import STATES, BoundaryTensor, StepStorage
from memadvisor.run.records import CUBLAS, UNEXPLAINED, Step, Storage
from memadvisor.run.run import RankRun


def step_storages(
    rank: RankRun,
    step: Step,
    placed: Sequence[Placed],
    passes: Passes,
    boundaries: Mapping[int, BoundaryTensor],
    *,
    saved: Mapping[int, SavedStorages] | None = None,
    freed: Collection[int] = (),
    casts: Collection[int] = (),
) -> tuple[StepStorage, ...]:
    """In the order of `placed`; last, as one piece, what the allocator held at the start and nothing explains.

    `freed` and `casts` are numbers of placed storages: those that a recomputation frees, and of these the
    weights that autocast has cast.
    """
    last_saved_s = _last_saved(placed, passes)
    stream_of = _streams(rank, step)
    first = first_products(rank.operators, (item.row for item in placed), passes.pieces)
    requested_bytes = requests([item.row for item in placed], rank.operators)
    products = sums_in_place((item.row for item in placed if item.birth >= 0), rank.parameters)
    begun = begun_with(placed, passes)
    places: dict[int, int] = {}
    storages: list[StepStorage] = []
    for number, item in in_order_of_allocation(list(enumerate(placed)), rank, step):
        row, unit = item.row, passes.forward.get(item.birth, (None, 0))[0]
        if row.size_bytes <= 0 or (row.death_s is not None and row.death_s <= row.birth_s):
            continue  # no bytes, or alive at no instant
        places[row.storage_id] = len(storages)
        storages.append(
            StepStorage(
                category=row.category,
                size_bytes=requested_bytes(row),
                birth_segment=item.birth,
                birth_s=row.birth_s,
                death_segment=item.death,
                death_s=math.inf if row.death_s is None else row.death_s,
                freed_by=unit if number in freed else None,
                unsaved_death=_unsaved_death(item, passes, is_cast=number in casts),
                boundary=boundaries.get(number),
                saved=(saved or {}).get(number),
                runs_again=(
                    unit is not None
                    and row.category not in STATES
                    and row.birth_s <= last_saved_s.get(item.birth, -math.inf)
                ),
                stream=stream_of(row),
                owner=row.unit if row.category in STATES else None,
                comes=first.pop(0) if item.birth < 0 and row.operator == CUBLAS and first else None,
                in_place_of=places.get(products.get(row.storage_id, -1)),
                cached=(begun[number], (-1, 0.0)) if number in begun else _cached(item, passes),
                accumulated=(
                    None if row.accumulated_s is None else place_at(passes.pieces, row.accumulated_s)
                ),
                number=number,
            )
        )
    return (*storages, *_unexplained(rank, step, len(passes.pieces)))


def in_order_of_allocation(
    items: Sequence[tuple[int, Placed]], rank: RankRun, step: Step
) -> list[tuple[int, Placed]]:
    """Parameters that were there before the step, in the order in which a GPU's allocator gave them: it fills a segment from
    its front. `module.to` moves those of inner modules first, and a script may make them on the device one by one."""
    starts = sorted(row.address for row in rank.segments if row.step == step.index)
    own = [n for n, (_, item) in enumerate(items) if item.birth < 0 and item.row.category == "parameter"]
    segments = {n: bisect_right(starts, items[n][1].row.address or 0) for n in own}
    if not starts or any(items[n][1].row.address is None for n in own):
        return list(items)
    first: dict[int, int] = {}
    for n in own:
        first.setdefault(segments[n], n)
    ordered = sorted(own, key=lambda n: (first[segments[n]], items[n][1].row.address))
    placed = list(items)
    for n, other in zip(own, ordered, strict=True):
        placed[n] = items[other]
    return placed


def _last_saved(placed: Sequence[Placed], passes: Passes) -> dict[int, float]:
    """By forward segment, when its unit saved its last tensor: there a recomputation stops."""
    latest: dict[int, float] = {}
    for item in placed:
        forward = passes.forward.get(item.birth)
        if forward is None or item.row.category in STATES:
            continue
        end_s = passes.pieces[item.birth].end_s
        for saved in item.saved:
            if saved.unit == forward[0] and saved.saved_s <= end_s:
                latest[item.birth] = max(saved.saved_s, latest.get(item.birth, saved.saved_s))
    return latest


def _unsaved_death(item: Placed, passes: Passes, *, is_cast: bool) -> tuple[int, float]:
    """Where it would die had its forward kept nothing: at its last use; a cast weight with autocast's cache."""
    if is_cast:
        return passes.end_of_cache(item), math.inf
    end_s = item.needed_until_s
    return item.birth, math.inf if end_s is None else max(end_s, item.row.birth_s)


def _cached(item: Placed, passes: Passes) -> tuple[str, tuple[int, float]] | None:
    unit = cached_unit(item, passes)
    if unit is None:
        return None
    if not item.saved:
        return unit, _unsaved_death(item, passes, is_cast=False)
    released_s = max(saved.released_s or 0.0 for saved in item.saved)
    return unit, (passes.segment_at(released_s), released_s)


def _streams(rank: RankRun, step: Step) -> Callable[[Storage], int]:
    """Numbers of the streams whose memory a GPU's storages are, by the segments that there are when the step ends: 0 is the
    one that has most of it, as it is where a segment is gone again.
    """
    segments = sorted(
        (row for row in rank.segments if row.step == step.index), key=lambda segment: segment.address
    )
    starts = [segment.address for segment in segments]
    sizes: Counter[int] = Counter()
    for segment in segments:
        sizes[segment.stream] += segment.total_bytes
    numbers = {stream: number for number, (stream, _) in enumerate(sizes.most_common())}

    def stream_of(row: Storage) -> int:
        place = -1 if row.address is None else bisect_right(starts, row.address) - 1
        if row.address is None or place < 0:
            return 0
        segment = segments[place]
        return numbers[segment.stream] if row.address < segment.address + segment.total_bytes else 0

    return stream_of


def _unexplained(rank: RankRun, step: Step, num_segments: int) -> tuple[StepStorage, ...]:
    before = [row for row in rank.residuals if row.time_s <= step.start_s]
    size_bytes = max(before, key=lambda row: row.time_s).unexplained_bytes if before else 0
    if size_bytes <= 0:
        return ()
    return (
        StepStorage(
            category=UNEXPLAINED,
            size_bytes=size_bytes,
            birth_segment=-1,
            birth_s=step.start_s,
            death_segment=num_segments,
            death_s=math.inf,
        ),
    )
