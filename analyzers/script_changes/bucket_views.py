"""Gradients beside the buckets of DistributedDataParallel, which hold the same once more.

`gradient_as_bucket_view=True` makes each gradient a part of its bucket (torch/nn/parallel/distributed.py: "saves peak
memory usage, where the saved memory size will be equal to the total gradients size"). What the backward has just
made for one parameter is still there until it is copied, which is before anything else is made.
"""

from __future__ import annotations

from bisect import bisect_right

from memadvisor.analyzers.altered_curve import moved_death
from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.units import format_bytes

_MOST_OF = 0.5  # buckets and gradients are as large as each other, but for parameters without gradients


def bucket_views(facts: Facts) -> ScriptChange | None:
    process = facts.rank.process
    if not process.has_ddp or process.has_zero_optimizer or facts.rank.shard_groups:
        return None
    storages = facts.calls.storages.values()
    buckets_bytes = sum(storage.size_bytes for storage in facts.buckets)
    gradients = [storage for storage in storages if storage.category == "gradient"]
    gradients_bytes = sum(storage.size_bytes for storage in gradients)
    if not gradients or buckets_bytes < _MOST_OF * gradients_bytes:
        return None
    births_s = sorted(storage.birth_s for storage in storages)
    changes = []
    for storage in gradients:
        until_s = facts.step.start_s
        if storage.phase != "baseline":
            following = bisect_right(births_s, storage.birth_s)
            until_s = births_s[following] if following < len(births_s) else facts.step.end_s
        if storage.death_s is None or until_s < storage.death_s:
            changes += moved_death(storage, until_s)
    saved_bytes = facts.peak_saved_bytes(changes)
    if not facts.is_worth(saved_bytes):
        return None
    return ScriptChange(
        kind="bucket_views",
        seen=f"DistributedDataParallel keeps gradients twice: {format_bytes(buckets_bytes)} in its buckets, and "
        "each beside them.",
        change="Write `DistributedDataParallel(model, gradient_as_bucket_view=True)`.",
        peak_saved_bytes=saved_bytes,
    )
