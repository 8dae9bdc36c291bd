"""Which storages of the traced step autograd keeps for a unit's backward, who else holds them, and which may be moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from memadvisor.analyzers.movable import calls_fed, calls_saved_until
from memadvisor.analyzers.placement import Passes, Placed, unit_inputs
from memadvisor.cost.saved import MIN_BYTES, SavedStorages, UnitCall
from memadvisor.cost.step import STATES
from memadvisor.run.run import RankRun


def saved_storages(
    rank: RankRun, placed: Sequence[Placed], casts: Collection[int], passes: Passes
) -> dict[int, SavedStorages]:
    """By number of the placed storage, of those that a unit's forward saves, or takes as input, and an engine may take.

    `casts`: weights that autocast has cast, which its cache holds until the forward's context is left.
    """
    stays, goes = _arguments(rank, placed, passes)
    found: dict[int, SavedStorages] = {}
    for number, item in enumerate(placed):
        row = item.row
        lives = 0 <= item.birth < item.death < len(passes.pieces)
        if row.category in STATES or row.size_bytes < MIN_BYTES or not lives:
            continue
        if any(saved.released_s is None for saved in item.saved):
            continue
        until, input_of = calls_saved_until(item, passes), calls_fed(item, passes)
        movable = _calls_that_may_move(item, until, stays, passes)
        taken_by = tuple(call for call in input_of if row.storage_id in goes.get(call, ()))
        if movable or taken_by:
            found[number] = SavedStorages(
                category=row.category,
                dtype=row.dtype,
                size_bytes=row.size_bytes,
                num_storages=1,
                micro_batch=passes.pieces[item.birth].micro_batch,
                birth_segment=item.birth,
                death_segment=item.death,
                saved_until=until,
                movable_by=movable,
                held_until=_held_until(item, until, passes, is_cast=number in casts),
                input_of=input_of,
                maker=passes.call_in(item.birth) if item.birth in passes.forward else None,
                taken_by=taken_by,
            )
    return found


def grouped(found: Collection[SavedStorages]) -> tuple[SavedStorages, ...]:
    """Those that are alike in all but their size as one, in order of birth."""
    groups: dict[object, SavedStorages] = {}
    for one in sorted(found, key=lambda one: one.birth_segment):
        key = (
            *(one.category, one.dtype, one.micro_batch, one.birth_segment, one.death_segment, one.held_until),
            *(
                one.movable_by,
                one.taken_by,
                one.maker,
                tuple(one.saved_until.items()),
                tuple(one.input_of.items()),
            ),
        )
        known = groups.get(key)
        if known is not None:
            size_bytes, num_storages = known.size_bytes + one.size_bytes, known.num_storages + 1
            one = replace(known, size_bytes=size_bytes, num_storages=num_storages)
        groups[key] = one
    return tuple(groups.values())


def _calls_that_may_move(
    item: Placed, until: Mapping[UnitCall, int], arguments: Mapping[UnitCall, set[int]], passes: Passes
) -> tuple[UnitCall, ...]:
    """Calls in one piece that save the storage for longer than themselves, in order of saving. Not of units that autograd goes
    through for a derivative too."""
    movable: dict[UnitCall, None] = {}
    for saved in sorted(item.saved, key=lambda saved: saved.saved_s):
        position = passes.forward_at(saved.saved_s)
        if position is None or passes.forward[position][0] != saved.unit or saved.unit in passes.walked_units:
            continue
        call = passes.call_in(position)
        if until[call] > position and item.row.storage_id not in arguments.get(call, ()):
            movable[call] = None
    return tuple(movable)


def _arguments(
    rank: RankRun, placed: Sequence[Placed], passes: Passes
) -> tuple[Mapping[UnitCall, set[int]], Mapping[UnitCall, set[int]]]:
    """By unit's call, what it is called with that needs no gradient, and that does. In older runs: what is no activation."""
    activations = {item.row.storage_id for item in placed if item.row.category == "activation"}
    stays: dict[UnitCall, set[int]] = defaultdict(set)
    goes: dict[UnitCall, set[int]] = defaultdict(set)
    for call, row in unit_inputs(rank):
        needs_gradient = row.needs_gradient
        if needs_gradient is None:
            needs_gradient = row.storage_id in activations
        (goes if needs_gradient else stays)[passes.call_at(call)].add(row.storage_id)
    return stays, goes


def _held_until(item: Placed, until: Mapping[UnitCall, int], passes: Passes, *, is_cast: bool) -> int:
    """Its last use in the forward, or the last time that somebody held it; its death, where that comes later than the last
    release explains."""
    if not until or item.death > passes.last_of_backward(max(until.values())):
        return item.death
    last_use_s = item.needed_until_s
    used = item.birth if last_use_s is None else max(item.birth, passes.segment_at(last_use_s))
    return max(used, passes.end_of_cache(item)) if is_cast else used
