"""Which storages of the traced step an engine may keep in fewer bits, when autograd asks for them, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from memadvisor.activation_bits import FLOATING, STATISTIC_SHARE
from memadvisor.analyzers.placement import Passes, Placed, unit_inputs
from memadvisor.analyzers.shapes import dimensions
from memadvisor.cost.rounded_activations import RoundableStorage, RoundingCost, Save
from memadvisor.cost.saved import SavedStorages, UnitCall
from memadvisor.run.run import RankRun

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}


def roundable_storages(
    rank: RankRun,
    placed: Sequence[Placed],
    saved: Mapping[int, SavedStorages],
    casts: Collection[int],
    passes: Passes,
) -> tuple[RoundableStorage, ...]:
    """Of those that an engine may take (`saved`), in order of birth; none in runs that do not tell what needs a gradient.

    A mask is a boolean, or what `aten::bernoulli_` has written; whatever else needs no gradient stays as it is.
    """
    drawn = {row.changes for row in rank.operators if row.name == "aten::bernoulli_"}
    fewest = _fewest_elements(rank, placed, passes)
    found = (
        _roundable(placed[number], one, passes, fewest, is_drawn=placed[number].row.storage_id in drawn)
        for number, one in sorted(saved.items())
        if number not in casts
    )
    return tuple(one for one in found if one is not None)


def _roundable(
    item: Placed, one: SavedStorages, passes: Passes, fewest: Mapping[UnitCall, int], *, is_drawn: bool
) -> RoundableStorage | None:
    row = item.row
    item_bytes = _ITEM_BYTES.get(row.dtype)
    rows = sorted(item.saved, key=lambda saved: saved.saved_s)
    if item_bytes is None or row.death_s is None:
        return None
    first = next((saved for saved in rows if passes.call_of(saved) in one.movable_by), None)
    count = row.size_bytes // item_bytes
    is_mask = row.dtype == "bool" or is_drawn
    if first is None or first.needs_gradient is None:
        return None
    if not is_mask and (
        row.dtype not in FLOATING or not first.needs_gradient or count < fewest[passes.call_of(first)]
    ):
        return None
    used_s = max(row.birth_s, item.needed_until_s or row.birth_s)
    return RoundableStorage(
        category=row.category,
        dtype=row.dtype,
        size_bytes=row.size_bytes,
        num_elements=count,
        is_mask=is_mask,
        death_s=row.death_s,
        held_until_s=row.death_s if one.held_until == item.death else used_s,
        input_until_s=_inputs_until_s(one, passes),
        saves=tuple(_saves(item, one.movable_by, passes)),
    )


def _inputs_until_s(one: SavedStorages, passes: Passes) -> dict[str, float]:
    until: dict[str, float] = {}
    for (unit, _), at in one.input_of.items():
        until[unit] = max(passes.pieces[at].end_s, until.get(unit, 0.0))
    return until


def _saves(item: Placed, movable_by: Collection[UnitCall], passes: Passes) -> Iterator[Save]:
    for saved in sorted(item.saved, key=lambda saved: saved.saved_s):
        if saved.released_s is not None:
            rounds = passes.call_of(saved) in movable_by
            yield Save(saved.unit, rounds, saved.saved_s, saved.unpacked_s, saved.released_s)


def _fewest_elements(rank: RankRun, placed: Sequence[Placed], passes: Passes) -> Mapping[UnitCall, int]:
    """By unit's call, of how many elements on a tensor is no statistic: a part of the largest that it is called with."""
    sizes = {
        item.row.storage_id: prod(dimensions(item.row.shape)) for item in placed if item.row.dtype in FLOATING
    }
    largest: dict[UnitCall, int] = defaultdict(int)
    for call, row in unit_inputs(rank):
        own = passes.call_at(call)
        largest[own] = max(largest[own], sizes.get(row.storage_id, 0))
    return defaultdict(int, {call: size // STATISTIC_SHARE for call, size in largest.items()})


def rounding_cost(rank: RankRun) -> RoundingCost | None:
    """What the run has measured of its own process; None where it has not, as on a device."""
    process = rank.process
    rounding_s, restoring_s = process.rounding_element_s, process.restoring_element_s
    if rounding_s is None or restoring_s is None or not process.device.startswith("cpu"):
        return None
    return RoundingCost(
        rounding_tensor_s=process.rounding_tensor_s or 0.0,
        rounding_element_s=rounding_s,
        restoring_tensor_s=process.restoring_tensor_s or 0.0,
        restoring_element_s=restoring_s,
    )
