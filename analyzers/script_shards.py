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
from memadvisor.cost.fsdp2_sizes import padded_bytes
from memadvisor.cost.late_sharding import LateSharding
from memadvisor.errors import UsageError
from memadvisor.precision import bytes_in
from memadvisor.run.records import Collective, Step, Storage
from memadvisor.run.run import RankRun

_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


def check_predictable(rank: RankRun, step: Step) -> None:
    """Raise UsageError for FSDP2 that is set up in a way that no plan sets it in."""
    what = unplayed(rank, step)
    if what is not None:
        raise UsageError(
            f"The script's own FSDP2 {what}, and no plan sets what it frees and gathers then.",
            hint="`memadvisor advise RUN --memory SIZE`, without other options, chooses what all ranks recompute alike; or "
            "shard each block and one model, by rows and all on one mesh of all ranks.",
        )


def unplayed(rank: RankRun, step: Step) -> str | None:
    """What the script's FSDP2 does, in words, that no plan plays or sets; None where there is nothing."""
    return next((what for what, is_so in _reasons(rank, step).items() if is_so), None)


def absent_in_backward(rank: RankRun) -> set[str]:
    """Units that cannot run again in a backward, for which FSDP2 does not gather their parameters (`set_unshard_in_backward`)."""
    groups = {group.name for group in rank.shard_groups if not group.gathers_in_backward}
    return {unit.name for unit in rank.units if unit.shard_group in groups}


def _reasons(rank: RankRun, step: Step) -> dict[str, bool]:
    """What no plan is made for, and whether it is so."""
    groups, num_replicas = rank.shard_groups, _num_replicas(rank)
    split = next(
        (u.name for u in rank.units if u.shard_group is None or not _is_around(u.shard_group, u.name, rank)),
        None,
    )
    return {
        "shards some or all of several models that the script calls by themselves": len(
            {unit.model for unit in rank.units}
        )
        > 1,
        "offloads its shards from a GPU": rank.process.device != "cpu"
        and any(group.offloads for group in groups),
        "shares parts of the model among fewer ranks than others": len(
            {(group.num_ranks, group.num_replicas) for group in groups}
        )
        > 1,
        "shares its parameters with no other rank": any(group.num_ranks == 1 for group in groups),
        "leaves ranks out": any(g.num_ranks * g.num_replicas != rank.process.world_size for g in groups),
        "accumulates gradients on a mesh with one replica, and holds the sums across it": (
            num_replicas == 1 and step.num_micro_batches > 1 and bool(_in_backward(rank, step, "all_reduce"))
        ),
        "shards tensors otherwise than by rows, or has several meshes or policies in one module": (
            not all(group.is_plain for group in groups)
        ),
        "frees parameters to parts of fewer ranks (reshard_after_forward of a number) that no backward gathers again "
        "(set_unshard_in_backward)": any(g.forward_ranks and not g.gathers_in_backward for g in groups),
        "frees the parameters of some modules to parts of fewer ranks after the forward (reshard_after_forward of a number), and "
        "those of others to none or other ones": len({g.forward_ranks for g in groups if g.reshards}) > 1,
        f"gathers parts of {split!r} by themselves, or leaves parameters whole": split is not None,
        "reduces gradients neither in each micro-batch nor in the last one alone": not (
            _num_reduced(rank, step) >= max(1, step.num_micro_batches) or _reduces_late(rank, step)
        ),
        "frees some parameters after the backward of a micro-batch, and others not": _frees_some_late(
            rank, step
        ),
        "sums gradients across groups of ranks neither in each micro-batch nor in the last one alone": not (
            _sums_in_each(rank, step) or _sums_late(rank, step)
        ),
    }


def _is_around(group: str, unit: str, rank: RankRun) -> bool:
    """Whether what is gathered together is this unit, or several ones."""
    own = [other.name for other in rank.units if other.shard_group == group]
    if len(own) > 1 or not group or unit == group or unit.startswith(f"{group}."):
        return True
    return group.startswith(f"{unit}.") and _is_wrapper(unit, group, rank)


def _is_wrapper(name: str, inner: str, rank: RankRun) -> bool:
    """Whether a module is nothing but another one and what is around it, as a checkpoint's wrapper is (accelerate's)."""
    while name != inner:
        children = [module.name for module in rank.modules if module.name.rpartition(".")[0] == name]
        if len(children) != 1:
            return False
        name = children[0]
    return True


def _num_reduced(rank: RankRun, step: Step) -> int:
    """Micro-batches in whose backward each group was reduced."""
    num_groups, rows = _num_reducible(rank), _in_backward(rank, step, "reduce_scatter")
    return len(rows) // num_groups if num_groups else step.num_micro_batches


def _reduces_late(rank: RankRun, step: Step) -> bool:
    """Whether it was in the last micro-batch alone (`set_requires_gradient_sync`)."""
    rows = _in_backward(rank, step, "reduce_scatter")
    if len(_starts(rank, step)) < 2 or len(rows) != _num_reducible(rank):
        return False
    return bool(rows) and min(row.issue_s for row in rows) >= _starts(rank, step)[-1]


def _starts(rank: RankRun, step: Step) -> list[float]:
    """When the first forward of each micro-batch begins."""
    starts: dict[int, float] = {}
    for span in rank.spans:
        if span.step == step.index and span.kind == "forward":
            starts[span.micro_batch] = min(span.start_s, starts.get(span.micro_batch, span.start_s))
    return sorted(starts.values())


def _gathered_forward(rank: RankRun, step: Step) -> list[int]:
    """How many gathers each micro-batch's forward has."""
    starts = _starts(rank, step)
    counts = [0] * len(starts)
    for row in _of_step(rank, step):
        place = bisect_right(starts, row.issue_s) - 1
        if place >= 0 and (row.operation, row.phase) == ("all_gather", "forward"):
            counts[place] += 1
    return counts


def _frees_late(rank: RankRun, step: Step) -> bool:
    """Whether what the first micro-batch gathers stays until the last one's backward (`set_reshard_after_backward`)."""
    counts, again = _gathered_forward(rank, step), _num_freed_before_backward(rank)
    return len(counts) > 1 and counts[0] > again and set(counts[1:]) == {again}


def _frees_some_late(rank: RankRun, step: Step) -> bool:
    counts, again = _gathered_forward(rank, step), _num_freed_before_backward(rank)
    return len(counts) > 1 and len(set(counts[1:])) == 1 and again < counts[1] < counts[0]


def _num_freed_before_backward(rank: RankRun) -> int:
    """Groups that each forward gathers anew, since it frees them and no backward needs them."""
    names = {group.name for group in rank.shard_groups if group.reshards and not group.gathers_in_backward}
    return len(names & {unit.shard_group for unit in rank.units})


def late_sharding(rank: RankRun, step: Step) -> LateSharding:
    """What the script leaves to the last micro-batch; of a step that `check_predictable` lets pass."""
    return LateSharding(
        reduces=_reduces_late(rank, step), sums=_sums_late(rank, step), frees=_frees_late(rank, step)
    )


def _num_reducible(rank: RankRun) -> int:
    """Groups with gradients."""
    groups = {group.name for group in rank.shard_groups}
    return len({unit.shard_group for unit in rank.units if unit.trainable_bytes} & groups)


def _sums_in_each(rank: RankRun, step: Step) -> bool:
    """Whether what is reduced in a micro-batch is summed across groups of ranks in the same one, where there are several."""
    sums, reductions = (_in_backward(rank, step, name) for name in ("all_reduce", "reduce_scatter"))
    return _num_replicas(rank) == 1 or len(sums) >= len(reductions)


def _sums_late(rank: RankRun, step: Step) -> bool:
    """Whether it is in the last micro-batch alone (`set_requires_all_reduce`)."""
    sums, reductions = (_in_backward(rank, step, name) for name in ("all_reduce", "reduce_scatter"))
    num_groups, num_before = _num_reducible(rank), max(1, step.num_micro_batches) - 1
    if _num_replicas(rank) == 1 or not num_before or len(sums) != num_groups:
        return False
    before = [row for row in reductions if row.issue_s < sums[0].issue_s]
    # The first sum of the last micro-batch stands after its own first reduction.
    return len(before) == num_before * num_groups + 1


def _num_replicas(rank: RankRun) -> int:
    return max((group.num_replicas for group in rank.shard_groups), default=1)


def with_buffers_counted(rank: RankRun, step: Step) -> RankRun:
    """The same, with what a backend copies while a collective runs counted as communication, and with what a reduction to
    shards leaves, where that is added to gradients or to other sums and so is no gradient.

    Whole gradients that are not reduced, but added to others in another dtype, are gradients too, and what a forward leaves of
    parameters that it frees to parts of fewer ranks are parameters: none of FSDP2's operators names them."""
    rows = _of_step(rank, step)
    spans = sorted((row.issue_s, row.end_s) for row in rows if row.end_s is not None)
    starts = [start_s for start_s, _ in spans]

    def is_copy(row: Storage) -> bool:
        place = bisect_right(starts, row.birth_s) - 1
        inside = row.category == "temporary" and row.operator.startswith("inside ")
        return inside and place >= 0 and row.birth_s <= spans[place][1]

    left = _left_by_reductions(rank, _in_backward(rank, step, "reduce_scatter"))
    summed_in = {group.name: group.reduce_dtype for group in rank.shard_groups}
    sums = {unit.name: summed_in.get(unit.shard_group or "") for unit in rank.units}
    is_late, part_sizes = _reduces_late(rank, step), _part_sizes(rank)

    def category(row: Storage) -> str:
        if row.category != "temporary":
            return row.category
        if is_copy(row) or row.storage_id in left:
            return "communication"
        is_left = (
            row.operator == "aten::clone" and row.phase != "backward"
        )  # the model's own are behind its forward
        if is_left and row.size_bytes in part_sizes:
            return "parameter"
        is_whole = is_late and row.accumulated_s is not None and sums.get(row.unit) not in (None, row.dtype)
        return "gradient" if is_whole else row.category

    return replace(rank, storages=tuple(replace(row, category=category(row)) for row in rank.storages))


def _part_sizes(rank: RankRun) -> set[int]:
    """Of what is left of each parameter that the script frees to parts of fewer ranks after the forward."""
    of_unit = {unit.name: unit.shard_group for unit in rank.units}
    parted = {group.name: group for group in rank.shard_groups if group.reshards and group.forward_ranks}
    found = set()
    for parameter in rank.parameters:
        group = parted.get(of_unit.get(parameter.unit) or "")
        if group is not None and not parameter.tied_to:
            gathered = bytes_in(
                padded_bytes(parameter, group.num_ranks),
                parameter.dtype,
                group.param_dtype or parameter.dtype,
            )
            found.add(gathered // (group.forward_ranks or 1))
    return found


def _left_by_reductions(rank: RankRun, reductions: Sequence[Collective]) -> set[int]:
    """Temporaries that reductions to shards were written to: FSDP2 allocates each just before."""
    births: dict[tuple[int, str], list[tuple[float, Storage]]] = defaultdict(list)
    for storage in rank.storages:
        if storage.phase == "backward":
            births[storage.size_bytes, storage.dtype].append((storage.birth_s, storage))
    found = set()
    for row in reductions:
        same = births[row.size_bytes // row.group_size, row.dtype]
        place = bisect_right(same, row.issue_s, key=lambda birth: birth[0]) - 1
        if place >= 0 and same[place][1].category == "temporary":
            found.add(same[place][1].storage_id)
    return found


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


def _in_backward(rank: RankRun, step: Step, operation: str) -> list[Collective]:
    return [row for row in _of_step(rank, step) if row.operation == operation and row.phase == "backward"]


def _of_step(rank: RankRun, step: Step) -> list[Collective]:
    """FSDP2's own: a script may sum over ranks itself, but does so outside the backward or in another group's size."""
    sizes = _sum_bytes(rank, step)
    sums = {
        (number, size) for number in {group.num_replicas for group in rank.shard_groups} for size in sizes
    }
    return [
        row
        for row in rank.collectives
        if row.step == step.index
        and row.operation in _OPERATIONS
        and not row.asynchronous
        and (
            row.operation != "all_reduce"
            or (row.phase == "backward" and (row.group_size, row.size_bytes) in sums)
        )
    ]


def _sum_bytes(rank: RankRun, step: Step) -> set[int]:
    """Sizes of what reductions to shards leave."""
    return {
        row.size_bytes // row.group_size
        for row in rank.collectives
        if row.step == step.index and row.operation == "reduce_scatter"
    }
