"""What autograd keeps from forwards for backwards, storage by storage: what may wait elsewhere in between.

`Inner` and `BoundaryTensor` of a step say what recomputing sets free; these say what an engine could take out of memory
meanwhile: it sees each storage that a unit's forward saves, however many views of it and however many units do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Of a storage: a transfer of less costs more calls than it frees memory.
MIN_BYTES = 64 * 2**10

UnitCall = tuple[str, int]  # a unit, and which of its calls in the micro-batch


@dataclass(frozen=True, slots=True)
class CallUses:
    """What is known of a `BoundaryTensor` by unit, by each call of those that use it."""

    saved_until: Mapping[UnitCall, int]
    input_of: Mapping[UnitCall, int]
    saved_by_takers: frozenset[UnitCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorages:
    """Storages of at least MIN_BYTES each, alike in all but their size. Segments are those of the captured step.

    `size_bytes`: of all of them. `saved_until`: for each unit's call that saves them, where autograd lets go of them.
    `movable_by`: those of these calls of which an engine may take them: not where they came in as an argument that needs
    no gradient, which others keep alive. `taken_by`: the calls that take them as input and need a gradient of
    them: where the unit is recomputed, that is what it keeps, and an engine may take it. `held_until`: the last segment in
    which anybody but autograd holds them. `input_of`: the backward segment of each call that takes them as input:
    recomputing that unit keeps them so long. `maker`: the call in which they are made; None for none.
    """

    category: str
    dtype: str
    size_bytes: int
    num_storages: int
    micro_batch: int | None
    birth_segment: int
    death_segment: int
    saved_until: Mapping[UnitCall, int]
    movable_by: tuple[UnitCall, ...]
    held_until: int
    input_of: Mapping[UnitCall, int]
    maker: UnitCall | None
    taken_by: tuple[UnitCall, ...] = ()
