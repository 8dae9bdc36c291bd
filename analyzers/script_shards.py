"""The traced step of a script that shards its model itself, with FSDP2: what of it is communication.

On a CPU FSDP2 waits for each collective where it is issued, so its time is part of the segment around it; and what
the backend copies in it looks like a temporary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from memadvisor.analyzers.placement import Stretch
from memadvisor.cost.collectives import Observation
from memadvisor.errors import UsageError
from memadvisor.run.records import Collective, Step, Storage
from memadvisor.run.run import RankRun

_OPERATIONS = ("all_gather", "reduce_scatter")


def check_predictable(rank: RankRun, step: Step) -> None:
    """Raise UsageError for FSDP2 that is set up in a way that no plan is made for."""
    world_size = rank.process.world_size
    split = next(
        (u.name for u in rank.units if u.shard_group is None or not _is_around(u.shard_group, u.name, rank)),
        None,
    )
    reasons = {
        "offloads its shards": any(group.offloads for group in rank.shard_groups),
        "shares its parameters among groups of ranks": any(
            group.num_replicas > 1 or group.num_ranks != world_size for group in rank.shard_groups
        ),
        "shards tensors otherwise than by rows, or frees them to fewer ranks": not all(
            group.is_plain for group in rank.shard_groups
        ),
        f"gathers parts of {split!r} by themselves, or leaves parameters whole": split is not None,
        "does not reduce the gradients of each micro-batch": _num_reduced(rank, step)
        < max(1, step.num_micro_batches),
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UsageError(
                f"The script's own FSDP2 {what}, and no plan is made for that.",
                hint="shard each block and the model, by rows and among all ranks; or wrap the model in "
                "DistributedDataParallel, and advise on a profile of that.",
            )


def _is_around(group: str, unit: str, rank: RankRun) -> bool:
    """Whether what is gathered together is this unit, or several ones."""
    own = [other.name for other in rank.units if other.shard_group == group]
    return len(own) > 1 or not group or unit == group or unit.startswith(f"{group}.")


def _num_reduced(rank: RankRun, step: Step) -> int:
    """Micro-batches in whose backward each group was reduced."""
    groups = [group.name for group in rank.shard_groups]
    rows = [
        row for row in _of_step(rank, step) if row.operation == "reduce_scatter" and row.phase == "backward"
    ]
    trainable = {unit.shard_group for unit in rank.units if unit.trainable_bytes} & set(groups)
    return len(rows) // len(trainable) if trainable else step.num_micro_batches


def with_copies_counted(rank: RankRun, step: Step) -> RankRun:
    """The same, with what a backend copies while a collective runs counted as communication."""
    spans = sorted((row.issue_s, row.end_s) for row in _of_step(rank, step) if row.end_s is not None)
    starts = [start_s for start_s, _ in spans]

    def is_copy(row: Storage) -> bool:
        place = bisect_right(starts, row.birth_s) - 1
        inside = row.category == "temporary" and row.operator.startswith("inside ")
        return inside and place >= 0 and row.birth_s <= spans[place][1]

    storages = [replace(row, category="communication") if is_copy(row) else row for row in rank.storages]
    return replace(rank, storages=tuple(storages))


def take_collectives(
    rank: RankRun,
    step: Step,
    pieces: Sequence[Stretch],
    durations: list[float],
    observations: Sequence[Observation],
) -> float:
    """Take the collectives that FSDP2 waits for out of `durations`; returns their seconds in all.

    Each takes what those of its size typically took by themselves in the traced step, at most its whole piece.
    """
    typical_s = typical_seconds(observations)
    starts = [piece.start_s for piece in pieces]
    taken_s = 0.0
    for row in _of_step(rank, step):
        position = bisect_right(starts, row.issue_s) - 1
        known_s = typical_s.get((row.operation, row.size_bytes))
        if known_s is not None and position >= 0:
            own_s = min(known_s, durations[position])
            durations[position] -= own_s
            taken_s += own_s
    return taken_s


def typical_seconds(observations: Sequence[Observation]) -> Mapping[tuple[str, int], float]:
    """The median of each operation and full message size."""
    seen: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in observations:
        seen[row.operation, row.size_bytes].append(row.duration_s)
    return {key: median(durations_s) for key, durations_s in seen.items()}


def _of_step(rank: RankRun, step: Step) -> list[Collective]:
    return [
        row
        for row in rank.collectives
        if row.step == step.index and row.operation in _OPERATIONS and not row.asynchronous
    ]
