"""Where memory ran out, how much was asked for, and what held the rest."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memadvisor.analyzers.peak import ModuleBytes, position_in_words
from memadvisor.run.allocator_records import LiveStorage, OutOfMemory
from memadvisor.run.records import CATEGORIES
from memadvisor.run.run import RankRun, Run

NUM_LARGEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryEvent:
    """An allocation that failed. Totals are of the moment before it, on the rank's own device.

    `by_category_bytes` sums over the storages that are known; `unlabelled_bytes` is what the allocator had handed
    out besides, None where its total is not known. With basis `known` that is all but parameters, gradients,
    optimizer state and buffers: activations, inputs and temporaries were not recorded. `hint` says how to see them.
    """

    event: int
    step: int | None
    phase: str
    module: str
    unit: str
    operator: str
    position: str
    requested_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    limit_bytes: int | None
    limit: str
    basis: str
    by_category_bytes: dict[str, int]
    unlabelled_bytes: int | None
    by_module: tuple[ModuleBytes, ...]
    largest: tuple[LiveStorage, ...]
    hint: str | None


def out_of_memory(rank: RankRun) -> tuple[OutOfMemoryEvent, ...]:
    """The rank's events in order of time."""
    alive: dict[int, list[LiveStorage]] = defaultdict(list)
    for storage in rank.live_storages:
        alive[storage.event].append(storage)
    return tuple(_event(row, alive[row.event]) for row in sorted(rank.out_of_memory, key=lambda r: r.time_s))


def _event(row: OutOfMemory, alive: list[LiveStorage]) -> OutOfMemoryEvent:
    by_category = dict.fromkeys(CATEGORIES, 0)
    by_module: dict[tuple[str, str, str], int] = defaultdict(int)
    for storage in alive:
        category = storage.category if storage.category in CATEGORIES else "other"
        by_category[category] += storage.size_bytes
        by_module[storage.module, storage.unit, category] += storage.size_bytes
    modules = [ModuleBytes(module=m, unit=u, category=c, size_bytes=n) for (m, u, c), n in by_module.items()]
    labelled_bytes = sum(by_category.values())
    single = [storage for storage in alive if storage.num_storages == 1]
    return OutOfMemoryEvent(
        event=row.event,
        step=row.step,
        phase=row.phase,
        module=row.module,
        unit=row.unit,
        operator=row.operator,
        position=position_in_words(row.phase, row.module or row.unit),
        requested_bytes=row.requested_bytes,
        allocated_bytes=row.allocated_bytes,
        reserved_bytes=row.reserved_bytes,
        limit_bytes=row.limit_bytes,
        limit=row.limit,
        basis=row.basis,
        by_category_bytes=by_category,
        unlabelled_bytes=None if row.allocated_bytes is None else row.allocated_bytes - labelled_bytes,
        by_module=tuple(sorted(modules, key=lambda m: (-m.size_bytes, m.module, m.category))),
        largest=tuple(sorted(single, key=lambda s: -s.size_bytes)[:NUM_LARGEST]),
        hint=_hint(row),
    )


def way_on(run: Run) -> str | None:
    """What to do about a run that ran out of memory before a step was traced, so that no plan can be made of it."""
    if any(rank.traced_step is not None for rank in run.ranks) or not any(r.out_of_memory for r in run.ranks):
        return None
    return (
        "profile it with a micro-batch that fits, and ask that run about the one that does not: `memadvisor advise RUN "
        "--micro-batch N --memory SIZE`. Without a profile, `memadvisor run --policy every-layer` recomputes every block."
    )


def _hint(row: OutOfMemory) -> str | None:
    """How to see what this event does not show; None where it shows all."""
    if row.basis != "known":
        return None
    at = "" if row.step is None else f", or trace the step with --trace-step {row.step}"
    return (
        "activations, inputs and temporaries are not told apart here; profile again with --memory-limit SIZE, "
        f"which watches every operator{at}."
    )
