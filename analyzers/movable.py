"""Which storages a recomputation would set free, and which flow between units."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from memadvisor.analyzers.placement import Passes, Placed
from memadvisor.analyzers.walked_twice import Copies, earlier_copies
from memadvisor.cost.saved import CallUses, UnitCall
from memadvisor.cost.step import STATES, BoundaryTensor, Inner


def inner_storages(
    placed: Sequence[Placed], freed: set[int], casts: set[int], passes: Passes
) -> Iterable[Inner]:
    """Freed storages of one unit, category and lifetime are one item.

    A weight that autocast has cast stays in its cache until the forward's context is left.
    """
    sizes: Counter[tuple[str, str, int, int, int, Copies]] = Counter()
    for number in sorted(freed):
        item = placed[number]
        unit, backward = passes.forward[item.birth]
        freed_after = passes.end_of_cache(item) if number in casts else item.birth
        death = min(item.death, backward)
        # A second run makes no cast that the cache still has.
        copies = tuple(each for each in earlier_copies(item, passes) if each[0] > freed_after)
        sizes[unit, item.row.category, item.birth, freed_after, death, copies] += item.row.size_bytes
    for (unit, category, birth, freed_after, death, copies), size_bytes in sizes.items():
        yield Inner(
            unit=unit,
            category=category,
            size_bytes=size_bytes,
            birth_segment=birth,
            freed_after_segment=freed_after,
            death_segment=death,
            earlier_copies=copies,
        )


def cached_keys(placed: Sequence[Placed], passes: Passes) -> Iterable[Inner]:
    """What a cache of keys and values alone holds of a unit: beyond the unit's forward, or, of what autograd keeps too,
    beyond the release of that. What it still holds as the step ends, the step has begun with."""
    starts = [piece.start_s for piece in passes.pieces]
    for item in placed:
        unit = cached_unit(item, passes)
        alone_after = max((item.birth, *saved_until(item, starts).values()))
        if unit is not None and item.death > alone_after:
            yield _cached(unit, item, item.birth, alone_after)
    forward_of = {unit: position for position, (unit, _) in passes.forward.items()}
    for number, unit in begun_with(placed, passes).items():
        yield _cached(unit, placed[number], forward_of[unit], -1)


def cached_unit(item: Placed, passes: Passes) -> str | None:
    """The unit that has put it into a cache, which is called without one where it is recomputed; None for all else."""
    unit, _ = passes.forward.get(item.birth, (None, 0))
    if not item.is_cached or (item.saved and passes.unit_that_frees(item) is None):
        return None
    return unit


def begun_with(placed: Sequence[Placed], passes: Passes) -> dict[int, str]:
    """By number, the units of what a cache of the step before still held as this one began: it looks as what this one leaves."""
    left: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    begun: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for number, item in enumerate(placed):
        looks = item.row.shape, item.row.dtype, item.row.size_bytes
        unit = cached_unit(item, passes)
        if unit is not None and item.death == len(passes.pieces):
            left[looks].append(unit)
        elif item.birth < 0 and item.death < len(passes.pieces) and item.row.category == "other":
            begun[looks].append(number)
    # Where their number is another, something else looks so.
    alike = ((begun[looks], units) for looks, units in left.items() if len(begun[looks]) == len(units))
    return {number: unit for numbers, units in alike for number, unit in zip(numbers, units, strict=True)}


def _cached(unit: str, item: Placed, forward: int, alone_after: int) -> Inner:
    return Inner(
        unit=unit,
        category=item.row.category,
        size_bytes=item.row.size_bytes,
        birth_segment=forward,
        freed_after_segment=alone_after,
        death_segment=item.death,
    )


def boundary_tensors(
    placed: Sequence[Placed], freed: set[int], casts: set[int], passes: Passes, missed: Mapping[int, int]
) -> dict[int, BoundaryTensor]:
    """By number: crossing storages that a unit takes as input, or that autograd keeps for the one that makes them while
    others need them too."""
    found: dict[int, BoundaryTensor] = {}
    starts = [piece.start_s for piece in passes.pieces]
    for number, item in enumerate(placed):
        row = item.row
        if number in freed or row.category in STATES or (item.death == item.birth and not item.is_argument):
            continue
        if item.is_argument and item.saved:
            continue  # it stays, and is what the second run saves
        again = cast_again(item, passes, starts) if number in casts else ()
        input_of = {} if again else units_fed(item, passes)
        maker = passes.forward.get(item.birth, (None, 0))[0]
        is_saved_by_maker = any(saved.unit == maker for saved in item.saved)
        if not is_saved_by_maker and (not input_of or item.death == len(passes.pieces)):
            continue
        last_use_s = item.needed_until_s
        last_use = item.birth if last_use_s is None else bisect_left(starts, last_use_s) - 1
        found[number] = BoundaryTensor(
            category=row.category,
            size_bytes=row.size_bytes,
            birth_segment=item.birth,
            death_segment=item.death,
            missed_bytes=missed.get(number, 0),
            last_use_segment=max(last_use, passes.end_of_cache(item)) if again else last_use,
            saved_until=saved_until(item, starts),
            input_of=input_of,
            saved_by_takers=frozenset(
                s.unit for s in item.saved if passes.forward_at(s.saved_s) != item.birth
            ),
            by_call=None if again else _uses_by_call(item, passes),
            cast_again=again,
            earlier_copies=earlier_copies(item, passes) if is_saved_by_maker and not again else (),
        )
    return found


def cast_again(item: Placed, passes: Passes, starts: Sequence[float]) -> tuple[tuple[str, int, int], ...]:
    """Of a weight that autocast has cast: the calls that save it, each by the segment of its backward and its release."""
    until: dict[tuple[str, int], int] = {}
    for saved in item.saved:
        position = passes.forward_at(saved.saved_s)
        if position is not None and saved.released_s is not None:
            call = passes.forward[position]
            until[call] = max(bisect_left(starts, saved.released_s) - 1, until.get(call, 0))
    return tuple((unit, backward, last) for (unit, backward), last in until.items())


def saved_until(item: Placed, starts: Sequence[float]) -> dict[str, int]:
    """For each unit that autograd keeps a storage for, the segment in which it lets go of it."""
    until: dict[str, int] = {}
    for saved in item.saved:
        end_s = saved.released_s if saved.released_s is not None else item.row.death_s or saved.saved_s
        until[saved.unit] = max(0, bisect_left(starts, end_s) - 1, until.get(saved.unit, 0))
    return until


def calls_saved_until(item: Placed, passes: Passes) -> dict[UnitCall, int]:
    """The same by call of these units."""
    until: dict[UnitCall, int] = {}
    for saved in item.saved:
        end_s = saved.released_s if saved.released_s is not None else item.row.death_s or saved.saved_s
        call = passes.call_of(saved)
        until[call] = max(0, passes.segment_at(end_s), until.get(call, 0))
    return until


def _uses_by_call(item: Placed, passes: Passes) -> CallUses | None:
    saved, fed = calls_saved_until(item, passes), calls_fed(item, passes)
    if passes.called_again.isdisjoint(unit for unit, _ in (*saved, *fed)):
        return None
    takers = (row for row in item.saved if passes.forward_at(row.saved_s) != item.birth)
    return CallUses(saved, fed, frozenset(passes.call_of(row) for row in takers))


def units_fed(item: Placed, passes: Passes) -> dict[str, int]:
    """Units that take or use a storage born before their forward, or are called with it, with the segment of their backward."""
    fed: dict[str, int] = {}
    for (unit, _), backward in calls_fed(item, passes).items():
        fed[unit] = max(backward, fed.get(unit, backward))
    return fed


def calls_fed(item: Placed, passes: Passes) -> dict[UnitCall, int]:
    """The same by call of these units."""
    used_s = None if item.ends_in_cast else item.row.last_forward_use_s
    times = [used_s, *item.taken_s, *(saved.saved_s for saved in item.saved)]
    positions = [at for time_s in times if (at := passes.forward_at(time_s)) is not None and at > item.birth]
    if item.is_argument and item.birth in passes.forward:
        positions.insert(0, item.birth)
    fed: dict[UnitCall, int] = {}
    for position in positions:
        call, backward = passes.call_in(position), passes.forward[position][1]
        fed[call] = max(backward, fed.get(call, backward))
    return fed
