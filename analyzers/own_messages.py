"""What a script sends by collectives of its own: memory that a plan leaves where it is.

`communication` is left out of what a plan plays, for DistributedDataParallel's buffers are its engine's under a plan. What a
forward or a backward makes in order to send it, or is sent (tokens to the ranks of their experts, heads and sequences of
attention, buffers of gradients that hooks of the script's reduce), is as large and as short-lived with a plan as without.
"""

from __future__ import annotations

from dataclasses import replace

from memadvisor.run.run import RankRun

_PASSES = ("forward", "recompute", "backward")


def with_own_messages(rank: RankRun) -> RankRun:
    """The same, with what forwards and backwards send counted as activation where autograd keeps it, else as temporary."""
    if not any(row.category == "communication" and row.phase in _PASSES for row in rank.storages):
        return rank
    saved = {row.storage_id for row in rank.saved}
    return replace(
        rank,
        storages=tuple(
            replace(row, category="activation" if row.storage_id in saved else "temporary")
            if row.category == "communication" and row.phase in _PASSES
            else row
            for row in rank.storages
        ),
    )
