"""Gradients of the step before that are still there while this step's forward fills the memory.

`optimizer.zero_grad()` lets go of them, since torch 2.0 without another word; with `set_to_none=False` it writes zeros
into them, and after the forward it comes too late.
"""

from __future__ import annotations

from collections import defaultdict

from memadvisor.analyzers.altered_curve import moved_death
from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.run.records import Storage
from memadvisor.units import format_bytes

_ZEROES = ("aten::zero_", "aten::_foreach_zero_")


def stale_gradients(facts: Facts) -> ScriptChange | None:
    forwards, backwards = facts.spans("forward"), facts.spans("backward")
    if not forwards or not backwards or facts.rank.shard_groups or _are_buckets(facts):
        return None
    begins_s, backward_s = forwards[0].start_s, backwards[0].start_s
    stale = [
        storage
        for storage in facts.calls.storages.values()
        if storage.category == "gradient"
        and storage.phase == "baseline"
        and (storage.death_s is None or storage.death_s > begins_s)
    ]
    are_zeroed = any(operator.name in _ZEROES for operator in facts.calls.operators)
    stays = any(storage.death_s is None for storage in stale)
    if not stale or (stays and not are_zeroed):
        return None  # they are added to, step after step
    changes = _without(facts, stale, backward_s)
    saved_bytes = facts.peak_saved_bytes(changes)
    if not facts.is_worth(saved_bytes):
        return None
    size_bytes = sum(storage.size_bytes for storage in stale)
    why = "they are set to zero, not let go" if stays else "`zero_grad` comes after it"
    return ScriptChange(
        kind="stale_gradients",
        seen=f"Gradients of the step before, {format_bytes(size_bytes)}, are there during the forward: {why}.",
        change="Call `optimizer.zero_grad()`, without `set_to_none=False`, "
        + ("before the forward." if stays else "right after `optimizer.step()`, or before the forward."),
        peak_saved_bytes=saved_bytes,
    )


def _without(facts: Facts, stale: list[Storage], backward_s: float) -> list[tuple[float, int]]:
    """One that goes by itself is made anew in any case; in place of one that stays, what the first backward adds to it
    becomes the gradient."""
    added = defaultdict(list)
    for storage in facts.calls.storages.values():
        if storage.phase == "backward" and storage.death_s is not None:
            added[storage.unit, storage.size_bytes].append(storage)
    changes = []
    for old in stale:
        if old.death_s is not None:
            changes += moved_death(old, facts.step.start_s)
            continue
        alike = added[old.unit, old.size_bytes]
        new = next((each for each in alike if each.shape == old.shape), alike[0] if alike else None)
        if new is not None:
            alike.remove(new)
        made_s = backward_s if new is None or new.death_s is None else new.death_s
        changes += [(facts.step.start_s, -old.size_bytes), (made_s, old.size_bytes)]
    return changes


def _are_buckets(facts: Facts) -> bool:
    """Under DistributedDataParallel with `gradient_as_bucket_view` they are parts of what it keeps."""
    return bool(facts.rank.process.has_ddp) and not facts.buckets
