"""Tensors that nothing needs any more, and that a variable keeps alive while the memory is at its fullest.

`out = model(x)` keeps `out` through the whole backward, and the one of the step before through this step's forward, until
the name is given to the next. Needed is what an operator still reads, what autograd keeps, and what a module that is
running was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memadvisor.analyzers.altered_curve import moved_death
from memadvisor.analyzers.script_changes.change import Facts, ScriptChange, in_words
from memadvisor.run.records import Storage

_CATEGORIES = ("activation", "temporary", "other")
_COMPILED = "Torch-Compiled Region"  # as torch names it to its profiler
_NUM_NAMED = 2
_MOST_NAMED = 20  # of so many together, each would be worth naming
_DELETE = "`del` the names once they have been used; or make and use them in a function that returns the loss alone."
_NO_CACHE = "Keys and values are in the model's cache, which a training does without: `model.config.use_cache = False`."


def held_results(facts: Facts) -> ScriptChange | None:
    if any(storage.operator.startswith(_COMPILED) for storage in facts.calls.storages.values()):
        return None  # what compiled code reads is not seen
    held = {storage.storage_id: until_s for storage, until_s in _held(facts)}
    changes = [
        change
        for number, until_s in held.items()
        for change in moved_death(facts.calls.storages[number], until_s)
    ]
    saved_bytes = facts.peak_saved_bytes(changes)
    if not facts.is_worth(saved_bytes):
        return None
    peak_s = float(facts.timeline.clock_s[facts.timeline.total_bytes.argmax()])
    alive = [
        storage
        for number, until_s in held.items()
        if until_s <= peak_s < _death_s(facts, storage := facts.calls.storages[number])
    ]
    alive = [storage for storage in alive if facts.is_worth(_MOST_NAMED * storage.size_bytes)]
    alive.sort(key=lambda storage: -storage.size_bytes)
    named = ", ".join(in_words(storage) for storage in alive[:_NUM_NAMED]) or "many small ones"
    more = f" and {len(alive) - _NUM_NAMED} more" if len(alive) > _NUM_NAMED else ""
    return ScriptChange(
        kind="held_results",
        seen=f"At the peak, variables hold what nothing reads any more: {named}{more}.",
        change=_change(facts, {storage.storage_id for storage in alive}),
        peak_saved_bytes=saved_bytes,
    )


def _change(facts: Facts, held: set[int]) -> str:
    cached = held & {row.storage_id for row in facts.rank.call_tensors if row.role == "cache"}
    if not cached:
        return _DELETE
    return _NO_CACHE if cached == held else f"{_DELETE} {_NO_CACHE}"


def _held(facts: Facts) -> Iterator[tuple[Storage, float]]:
    """Storages that outlive their use, with until when they were needed."""
    renewed = _renewed(facts)
    for storage in facts.calls.storages.values():
        # What comes in an optimizer's step may be the optimizer's own: L-BFGS keeps directions in its variables. What a
        # checkpoint's second run has made, torch's frames hold until it has ended; no name of the script's does.
        if storage.category not in _CATEGORIES or storage.phase in ("optimizer", "recompute"):
            continue
        if storage.phase == "baseline":
            # Else it may be there for steps to come: a data set, a running mean, another model.
            if storage.last_use_s is None and storage.death_s is not None:
                yield storage, facts.step.start_s
            continue
        # What lives on into the next step may be read there, unless that of the step before was not read in this one.
        if not storage.operator or (storage.death_s is None and not renewed[_kind(storage)]):
            continue
        until_s = _needed_until_s(facts, storage)
        if facts.calls.has_operator_between(until_s, _death_s(facts, storage)):
            yield storage, until_s


def _renewed(facts: Facts) -> Counter[tuple[str, int]]:
    """How many of a dtype and size were there when the step began, were not read, and went."""
    return Counter(
        _kind(storage)
        for storage in facts.calls.storages.values()
        if storage.phase == "baseline" and storage.last_use_s is None and storage.death_s is not None
    )


def _kind(storage: Storage) -> tuple[str, int]:
    return storage.dtype, storage.size_bytes


def _needed_until_s(facts: Facts, storage: Storage) -> float:
    calls = facts.calls
    kept = calls.saves_of.get(storage.storage_id, [])
    uses = (storage.birth_s, storage.last_use_s or storage.birth_s)
    return max(*uses, calls.released_s(kept), calls.argument_until_s(storage))


def _death_s(facts: Facts, storage: Storage) -> float:
    return facts.step.end_s if storage.death_s is None else storage.death_s
