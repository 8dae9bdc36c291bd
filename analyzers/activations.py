"""What the forward keeps for the backward: by whom, how much, for how long."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memadvisor.analyzers.checkpoint_frames import MODEL_STATES, TracedCalls
from memadvisor.analyzers.intervals import holds, union

NUM_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One storage that autograd kept. Times are seconds since the traced step began.

    `module` and `unit` are those that saved it first; `operator` made it (of a copy that a plan keeps, the
    original), `saved_by` are the operators whose backwards need it, in order of saving ("" where none was seen).
    `last_used_s` is its last use in the step, `released_s` when autograd let go of it, or a plan had moved it to
    another tier; both None where that was not seen. `returned_of`: the storage whose bytes are back here, where
    they have been moved; `saved_s` is then when room was made for them. `original_bytes`: of what is kept in fewer
    bits; None for all else. `other_modules` save it as well; `is_held_elsewhere`: it outlives autograd, so that
    somebody else, such as a variable of the script, keeps it alive anyway. `is_made_again`: saved in the backward, by
    the second forward of a checkpoint. `is_dropped`: autograd let go of it before the next backward began, as the script did
    of what had been made with it (a copy without a graph goes on in its place).
    """

    storage_id: int
    module: str
    unit: str
    micro_batch: int
    operator: str
    saved_by: tuple[str, ...]
    other_modules: tuple[str, ...]
    is_held_elsewhere: bool
    category: str
    dtype: str
    shape: str
    size_bytes: int
    born_s: float
    saved_s: float
    last_used_s: float | None
    released_s: float | None
    returned_of: int | None = None
    original_bytes: int | None = None
    is_made_again: bool = False
    is_dropped: bool = False

    @property
    def kept_s(self) -> float | None:
        """From the first save to the release, on the device."""
        return None if self.released_s is None else self.released_s - self.saved_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """What one unit or module keeps for the backward in one micro-batch (the one that kept most).

    A storage counts once, for the one that saved it first, also where it is moved to another tier and back. Model
    states and what was there before the step do not count: they would be alive anyway. Nor does what a checkpoint's
    second forward saves: it is there for one block's backward at a time, and a sum over all may exceed the peak; nor what is
    dropped.
    `by_operator_bytes` says which operators made it.
    """

    name: str
    unit: str
    saved_bytes: int
    num_storages: int
    by_operator_bytes: dict[str, int]  # largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Everything that autograd kept in the traced step.

    `saved_bytes` is what one micro-batch keeps (the one that kept most); units and modules are in order of
    first save, and their bytes sum to it where the same micro-batch was the largest for all of them. `moved_bytes`
    of it were on another tier for a while, and are back on the device for the backward.
    """

    saved_bytes: int
    moved_bytes: int
    units: tuple[SavedBytes, ...]
    modules: tuple[SavedBytes, ...]
    lifetimes: tuple[Lifetime, ...]  # in order of birth
    largest: tuple[Lifetime, ...]  # 20, by bytes
    longest: tuple[Lifetime, ...]  # 20, by kept_s

    @property
    def of_one_micro_batch(self) -> tuple[Lifetime, ...]:
        """Those that `saved_bytes` is the sum of, in order of first save."""
        in_order = _counted_once(self.lifetimes)
        fullest = _fullest_micro_batch(in_order)
        return tuple(life for life in in_order if life.micro_batch == fullest)


def activations(traced: TracedCalls | None) -> Activations | None:
    """Join saved tensors with their storages. None when no step was traced, or a backward came of what nobody told of: hooks
    of the script's were asked what to keep."""
    if traced is None or (
        not traced.rank.saved and any(row.phase == "backward" for row in traced.rank.operators)
    ):
        return None
    lifetimes = sorted(_lifetimes(traced), key=lambda life: (life.born_s, life.storage_id))
    in_order = _counted_once(lifetimes)
    fullest = _fullest_micro_batch(in_order)
    moved = {life.returned_of for life in lifetimes} - {None}
    kept = [life for life in lifetimes if life.kept_s is not None]
    return Activations(
        saved_bytes=sum(life.size_bytes for life in in_order if life.micro_batch == fullest),
        moved_bytes=sum(
            life.size_bytes for life in in_order if life.micro_batch == fullest and life.storage_id in moved
        ),
        units=_saved_bytes(in_order, by="unit"),
        modules=_saved_bytes(in_order, by="module"),
        lifetimes=tuple(lifetimes),
        largest=tuple(sorted(lifetimes, key=lambda life: -life.size_bytes)[:NUM_LISTED]),
        longest=tuple(sorted(kept, key=lambda life: -(life.kept_s or 0.0))[:NUM_LISTED]),
    )


def _counted_once(lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """In order of first save: without what is back from another tier, made again, or dropped."""
    known = {life.storage_id for life in lifetimes}
    return [
        life
        for life in sorted(lifetimes, key=lambda life: life.saved_s)
        if life.returned_of not in known and not (life.is_made_again or life.is_dropped)
    ]


def _fullest_micro_batch(lifetimes: Sequence[Lifetime]) -> int | None:
    by_micro_batch: dict[int, int] = defaultdict(int)
    for life in lifetimes:
        by_micro_batch[life.micro_batch] += life.size_bytes
    return max(by_micro_batch, key=lambda number: by_micro_batch[number], default=None)


def _lifetimes(traced: TracedCalls) -> Iterator[Lifetime]:
    start_s = traced.step.start_s
    backwards = sorted(
        span.start_s
        for span in traced.rank.spans
        if span.step == traced.step.index and span.kind == "backward"
    )
    moved = {row.copy_of for row in traced.saves}
    second_runs = union((c.start_s, c.end_s) for c in traced.rank.module_calls if c.phase == "recompute")
    for storage_id, rows in traced.saves_of.items():
        storage = traced.storages[storage_id]
        if storage.phase == "baseline" or storage.category in MODEL_STATES:
            continue  # alive anyway, whoever saves it
        first = rows[0]
        origin = traced.storages.get(storage_id if first.copy_of is None else first.copy_of, storage)
        is_back = origin is not storage and first.original_bytes is None
        releases = [row.released_s for row in rows if row.released_s is not None]
        released_s = max(releases) if len(releases) == len(rows) else None
        following = backwards[bisect_right(backwards, first.saved_s) :][:1]
        is_dropped = released_s is not None and any(released_s < start_s for start_s in following)
        yield Lifetime(
            storage_id=storage_id,
            module=first.module,
            unit=first.unit,
            micro_batch=first.micro_batch,
            operator=origin.operator,
            saved_by=tuple(dict.fromkeys(row.operator or "" for row in rows)),
            other_modules=tuple(dict.fromkeys(row.module for row in rows if row.module != first.module)),
            is_held_elsewhere=traced.is_held_elsewhere(storage),
            category=storage.category,
            dtype=(origin if is_back else storage).dtype,
            shape=(origin if is_back else storage).shape,
            size_bytes=storage.size_bytes,
            born_s=storage.birth_s - start_s,
            saved_s=first.saved_s - start_s,
            last_used_s=None if storage.last_use_s is None else storage.last_use_s - start_s,
            released_s=None if released_s is None else released_s - start_s,
            returned_of=origin.storage_id if is_back else None,
            original_bytes=first.original_bytes,
            is_made_again=first.copy_of is None and holds(second_runs, first.saved_s),
            is_dropped=is_dropped and storage_id not in moved,
        )


def _saved_bytes(lifetimes: list[Lifetime], *, by: str) -> tuple[SavedBytes, ...]:
    groups: dict[str, dict[int, list[Lifetime]]] = {}
    for life in lifetimes:
        name = life.unit if by == "unit" else life.module
        groups.setdefault(name, {}).setdefault(life.micro_batch, []).append(life)
    return tuple(_fullest(name, list(micro_batches.values())) for name, micro_batches in groups.items())


def _fullest(name: str, micro_batches: list[list[Lifetime]]) -> SavedBytes:
    lives = max(micro_batches, key=lambda lives: sum(life.size_bytes for life in lives))
    operators: dict[str, int] = defaultdict(int)
    for life in lives:
        operators[life.operator] += life.size_bytes
    return SavedBytes(
        name=name,
        unit=lives[0].unit,
        saved_bytes=sum(life.size_bytes for life in lives),
        num_storages=len(lives),
        by_operator_bytes=dict(sorted(operators.items(), key=lambda item: -item[1])),
    )
