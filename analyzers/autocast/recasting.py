"""Storages of a step while they are being turned into those of the same step under autocast."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from memadvisor.analyzers.inner_workspaces import INSIDE
from memadvisor.analyzers.shapes import dimensions
from memadvisor.precision import ITEM_BYTES
from memadvisor.run.records import Operator, Saved, Storage
from memadvisor.run.run import RankRun

WIDE, NARROW = "float32", "bfloat16"
CAST = "aten::_to_copy"
_CUDA_UNIT_BYTES = 512  # its allocator's sizes are multiples of it
_STATES = ("parameter", "gradient", "optimizer_state", "communication")


class Recasting:
    """`narrow`: float32 storages that are bfloat16 now. What else changes of a recorded storage is kept apart from it, until
    `done`."""

    def __init__(self, rank: RankRun) -> None:
        self._rank = rank
        self._is_on_cuda = rank.process.device.startswith("cuda")
        self._numbers = max((row.storage_id for row in rank.storages), default=0)
        self.narrow: set[int] = set()
        self.births: dict[int, float] = {}
        self.deaths: dict[int, float | None] = {}
        self.halved: set[int] = set()  # of no dtype
        self.emptied: set[int] = set()  # not there any more
        self.last_uses: dict[int, float] = {}  # of what the script makes a copy of: itself, used or held
        self._added: dict[int, Storage] = {}
        self._moved: dict[int, int] = {}  # by place among the saved rows, the storage that is kept instead
        self._saved: dict[int, list[tuple[int, Saved]]] = defaultdict(list)
        self._saved_by: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        for place, row in enumerate(rank.saved):
            self._saved[row.storage_id].append((place, row))
            self._saved_by[row.storage_id, row.node].append(place)

    # ---- what is asked -----------------------------------------------------------------------

    def is_narrow(self, row: Storage) -> bool:
        return row.dtype == NARROW or row.storage_id in self.narrow

    def bytes_in(self, row: Storage, dtype: str, shape: str = "") -> int:
        """What a recorded float32 storage takes in a dtype, or a tensor of this shape on it."""
        if dtype == WIDE and shape in ("", row.shape):
            return row.size_bytes
        shape = shape or row.shape
        size_bytes = ITEM_BYTES[dtype] * math.prod(dimensions(shape)) if shape else 0
        most_bytes = -(-row.size_bytes * ITEM_BYTES[dtype] // ITEM_BYTES[WIDE])
        if not size_bytes or size_bytes > most_bytes:
            size_bytes = most_bytes
        return -(-size_bytes // _CUDA_UNIT_BYTES) * _CUDA_UNIT_BYTES if self._is_on_cuda else size_bytes

    def saved_by(self, storage_id: int, node: int | None) -> list[int]:
        """Places of the rows that say that this node keeps the storage."""
        return self._saved_by.get((storage_id, node), []) if node is not None else []

    def shapes_of(self, saved: Iterable[int]) -> list[str]:
        return [self._rank.saved[place].shape for place in saved]

    def kept_until(self, storage_id: int, time_s: float) -> float | None:
        """When the last of what had saved it by then lets go of it, and `time_s` at the least; None: not in this step."""
        return self._last_of(
            [place for place, row in self._saved[storage_id] if row.saved_s < time_s], time_s
        )

    def saved_after(self, storage_id: int, time_s: float) -> list[int]:
        return [place for place, row in self._saved[storage_id] if row.saved_s >= time_s]

    def saved_between(self, storage_id: int, start_s: float, end_s: float) -> list[int]:
        return [place for place, row in self._saved[storage_id] if start_s <= row.saved_s < end_s]

    # ---- what is changed ---------------------------------------------------------------------

    def add(
        self,
        like: Storage,
        dtype: str,
        place: Storage,
        *,
        birth_s: float,
        death_s: float | None,
        saved: Iterable[int] = (),
        held_s: float | None = None,
        shape: str = "",
    ) -> int:
        """A copy of `like`, or of a tensor of this shape on it, in a dtype; its number. Made where `place` was, at
        `birth_s`; kept by autograd in place of it where the `saved` rows say so, and as long."""
        self._numbers += 1
        self._moved.update(dict.fromkeys(saved, self._numbers))
        self._added[self._numbers] = replace(
            place,
            storage_id=self._numbers,
            birth_s=birth_s,
            death_s=self._last_of(saved, death_s),
            size_bytes=self.bytes_in(like, dtype, shape),
            category="activation" if saved else "temporary",
            dtype=dtype,
            shape=shape or like.shape,
            operator=CAST,
            last_use_s=death_s,
            last_forward_use_s=None,
            address=None,
            last_held_s=held_s,
            accumulated_s=None,
        )
        return self._numbers

    def add_inside(
        self,
        running: Operator,
        near: Sequence[Storage],
        size_bytes: int,
        lives_s: tuple[float, float] | None = None,
    ) -> None:
        """What an operator has for itself beside its results, `near` which it is made; where it is not known when, at its end."""
        self._numbers += 1
        made_s = max([row.birth_s for row in near if row.birth_s < running.end_s], default=running.start_s)
        birth_s = (max(made_s, running.start_s) + running.end_s) / 2
        birth_s, death_s = lives_s or (birth_s, (birth_s + running.end_s) / 2)
        self._added[self._numbers] = replace(
            near[0],
            storage_id=self._numbers,
            birth_s=birth_s,
            death_s=death_s,
            size_bytes=size_bytes,
            category="temporary",
            dtype="",
            shape="",
            module=running.module,
            unit=running.unit,
            phase=running.phase,
            operator=INSIDE + running.name,
            last_use_s=None,
            last_forward_use_s=None,
            address=None,
            last_held_s=None,
            accumulated_s=None,
        )

    def keep_too(self, number: int, saved: Iterable[int]) -> None:
        """Autograd keeps this copy in place of what these rows say, too."""
        self._moved.update(dict.fromkeys(saved, number))
        row = self._added[number]
        self._added[number] = replace(
            row, death_s=self._last_of(saved, row.death_s), category="activation" if saved else row.category
        )

    def keep_until(self, number: int, death_s: float) -> None:
        row = self._added[number]
        if row.death_s is not None and row.death_s < death_s:
            self._added[number] = replace(row, death_s=death_s)

    def settle(self, number: int, last_use_s: float) -> None:
        """This copy is there until its last use, and as long as autograd keeps it still."""
        row = self._added[number]
        saved = [place for place, moved in self._moved.items() if moved == number]
        self._added[number] = replace(
            row,
            death_s=self._last_of(saved, last_use_s),
            last_use_s=last_use_s,
            category="activation" if saved else "temporary",
        )

    def let_go(self, number: int, row: Storage) -> None:
        """This copy of a row's storage is there until its last use, where other copies have since been kept in place of it."""
        places = {place: self._moved.get(place) for place, _ in self._saved[row.storage_id]}
        copy = self._added[number]
        if any(
            moved not in (None, number) and self._rank.saved[place].saved_s >= copy.birth_s
            for place, moved in places.items()
        ):
            left = [self._rank.saved[place] for place, moved in places.items() if moved == number]
            shortened = self._without(replace(row, birth_s=copy.birth_s), left)
            self._added[number] = replace(copy, death_s=shortened.death_s, category=shortened.category)

    def _last_of(self, saved: Iterable[int], death_s: float | None) -> float | None:
        ends = [self._rank.saved[place].released_s for place in saved]
        if death_s is None or None in ends:
            return None
        return max([death_s, *(end_s for end_s in ends if end_s is not None)])

    # ---- what has come of it -----------------------------------------------------------------

    def done(self) -> RankRun:
        saved = tuple(
            replace(row, storage_id=self._moved[place], size_bytes=self._added[self._moved[place]].size_bytes)
            if place in self._moved
            else replace(row, size_bytes=row.size_bytes // 2)
            if row.storage_id in self.narrow
            else row
            for place, row in enumerate(self._rank.saved)
        )
        storages = [self._changed(row) for row in self._rank.storages]
        return replace(
            self._rank,
            storages=tuple(sorted([*storages, *self._added.values()], key=lambda row: row.birth_s)),
            saved=saved,
        )

    def _changed(self, row: Storage) -> Storage:
        if row.storage_id in self.narrow:
            row = replace(row, dtype=NARROW, size_bytes=self.bytes_in(row, NARROW))
        elif row.storage_id in self.emptied:
            row = replace(row, size_bytes=0)
        elif row.storage_id in self.halved:
            row = replace(row, size_bytes=row.size_bytes // 2)
        if row.storage_id in self.births:
            row = replace(row, birth_s=self.births[row.storage_id])
        rows = self._saved[row.storage_id]
        moved = [saved for place, saved in rows if place in self._moved]
        if row.storage_id in self.deaths:
            row = replace(row, death_s=self.deaths[row.storage_id])
        elif (
            (moved or row.storage_id in self.last_uses)
            and row.category not in _STATES
            and row.phase != "baseline"
        ):
            row = self._without(row, [saved for place, saved in rows if place not in self._moved])
        return row

    def _without(self, row: Storage, left: Iterable[Saved]) -> Storage:
        """A storage that a copy is kept in place of: it is there until its last use, and as long as others hold it."""
        left = list(left)
        ends = [saved.released_s for saved in left]
        if None in ends:
            return row
        last_s = self.last_uses.get(row.storage_id)
        uses = (row.last_forward_use_s, row.last_held_s, *ends) if last_s is None else (last_s, *ends)
        last_s = max((time_s for time_s in uses if time_s is not None), default=row.birth_s)
        category = "temporary" if not left and row.category == "activation" else row.category
        if row.death_s is None and all(
            saved.released_s is not None for _, saved in self._saved[row.storage_id]
        ):
            return replace(row, category=category)  # the script has it still, as it has its batch
        death_s = last_s if row.death_s is None else min(row.death_s, last_s)
        return replace(row, death_s=max(death_s, row.birth_s), category=category)
