"""What a script sends by collectives of its own: memory that a plan leaves where it is.

`communication` is left out of what a plan plays, for DistributedDataParallel's buffers are its engine's under a plan. What a
forward or a backward makes in order to send it, or is sent (tokens to the ranks of their experts, heads and sequences of
attention, buffers of gradients that hooks of the script's reduce), is as large and as short-lived with a plan as without.
DistributedDataParallel makes its buckets anew in one forward, of a static graph the third: they are its own, too.
"""

from __future__ import annotations

from dataclasses import replace

from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun

_PASSES = ("forward", "recompute", "backward")


def with_own_messages(rank: RankRun) -> RankRun:
    """The same, with what forwards and backwards send counted as activation where autograd keeps it, else as temporary."""
    sent = [row for row in rank.storages if row.category == "communication" and row.phase in _PASSES]
    of_ddp = {row.storage_id for row in _buckets_made_anew(rank, sent)}
    own = {row.storage_id for row in sent} - of_ddp
    if not own:
        return rank
    saved = {row.storage_id for row in rank.saved}
    return replace(
        rank,
        storages=tuple(
            replace(row, category="activation" if row.storage_id in saved else "temporary")
            if row.storage_id in own
            else row
            for row in rank.storages
        ),
    )


def _buckets_made_anew(rank: RankRun, sent: list[Storage]) -> list[Storage]:
    """Of what is sent, that which stays behind the step, where what was sent before does not."""
    step = rank.traced_step
    if not rank.process.has_ddp or step is None:
        return []
    end_s = step.end_s

    def stays(row: Storage) -> bool:
        return row.death_s is None or row.death_s > end_s

    old = (row for row in rank.storages if row.category == "communication" and row.phase == "baseline")
    return [] if all(map(stays, old)) else [row for row in sent if stays(row)]
