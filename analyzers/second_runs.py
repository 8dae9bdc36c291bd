"""What recomputing each unit of the traced step would run again, in seconds of the timed steps."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from memadvisor.analyzers.changed_buffers import Copies, compiled_statistics
from memadvisor.analyzers.placement import Stretch
from memadvisor.cost.second_run import FREE, SecondRun, SecondRunCost
from memadvisor.run.records import Operator
from memadvisor.run.run import RankRun

_Work = tuple[str, int, int | None, int | None]  # an operator, its FLOPs, and what it reads and writes


def second_run_cost(rank: RankRun) -> SecondRunCost:
    """What the run has measured of its own process, as far as it is waited for; nothing, where it has not."""
    call_s, tensor_s = rank.process.second_run_call_s, rank.process.second_run_tensor_s
    if call_s is None or tensor_s is None:
        return FREE
    cost = SecondRunCost(
        call_s=max(0.0, call_s),
        tensor_s=max(0.0, tensor_s),
        operator_s=max(0.0, rank.process.second_run_operator_s or 0.0),
    )
    return cost if rank.process.device.startswith("cpu") else cost.times(_waited_share(rank, cost))


def _waited_share(rank: RankRun, cost: SecondRunCost) -> float:
    """Of the host's work in second runs of all units, what a device waits for that was as far behind at the end of the
    backward as it was in the timed steps; none where that is not known."""
    lags_s = [step.device_lag_s for step in rank.steps if not step.traced and step.device_lag_s is not None]
    traced = rank.traced_step
    if not lags_s or traced is None:
        return 0.0
    num_calls = sum(span.kind == "unit_forward" and span.step == traced.index for span in rank.spans)
    host_s = cost.call_s * num_calls + cost.tensor_s * len(rank.saved)
    return max(0.0, 1 - statistics.median(lags_s) / host_s) if host_s else 0.0


def second_runs(
    rank: RankRun, pieces: Sequence[Stretch], durations: Sequence[float]
) -> Mapping[tuple[str, int | None], SecondRun]:
    """By unit and pass. A forward's timed seconds are dealt out to its operators as the traced step has them.

    Units of one class that run the same operators on as many bytes share their times: a search takes those that seem
    cheapest, and among equals those would be the ones whose times happened to be too low. FLOPs alone tell too little:
    a convolutional network's stages have as many, and ever fewer bytes.
    """
    operators = sorted((op for op in rank.operators if op.phase == "forward"), key=lambda op: op.start_s)
    starts = [operator.start_s for operator in operators]
    rows = sorted(rank.saved, key=lambda row: row.saved_s)
    saved = [row.saved_s for row in rows]
    copies_in, compiled_bytes = Copies(rank), compiled_statistics(rank)
    found: dict[tuple[str, int | None], SecondRun] = {}
    work: dict[tuple[str, int | None], tuple[_Work, ...]] = defaultdict(tuple)
    for piece, whole_s in zip(pieces, durations, strict=True):
        if piece.phase != "forward" or piece.unit is None:
            continue
        first, last = bisect_left(saved, piece.start_s), bisect_right(saved, piece.end_s)
        inside = operators[bisect_left(starts, piece.start_s) : bisect_right(starts, piece.end_s)]
        share = _share_until(saved[last - 1], inside) if last > first else 1.0
        before = found.get((piece.unit, piece.pass_number))
        # One that others interrupt runs again up to the last tensor of its last part that saves any.
        earlier = before.whole_s if before is not None else 0.0
        copied_bytes, saved_copies_bytes = copies_in(inside, rows[first:last])
        if not copied_bytes and before is None:
            copied_bytes = compiled_bytes.get(piece.unit, 0)
        stopped = before.until_saved_s if before is not None and last == first else earlier + whole_s * share
        found[piece.unit, piece.pass_number] = SecondRun(
            whole_s=earlier + whole_s,
            until_saved_s=stopped,
            num_saved=last - first + (before.num_saved if before is not None else 0),
            num_operators=len(inside) + (before.num_operators if before is not None else 0),
            copied_bytes=copied_bytes + (before.copied_bytes if before is not None else 0),
            saved_copies_bytes=saved_copies_bytes + (before.saved_copies_bytes if before is not None else 0),
        )
        work[piece.unit, piece.pass_number] += tuple(map(_work, inside))
    types = {unit.name: unit.type_name for unit in rank.units}
    alike: dict[object, list[SecondRun]] = defaultdict(list)
    for key, run in found.items():
        alike[types.get(key[0]), work[key], run.num_saved].append(run)
    return {key: _mean(alike[types.get(key[0]), work[key], run.num_saved]) for key, run in found.items()}


def _work(operator: Operator) -> _Work:
    return operator.name, operator.executed_flops, operator.read_bytes, operator.written_bytes


def _mean(runs: Sequence[SecondRun]) -> SecondRun:
    return SecondRun(
        whole_s=sum(run.whole_s for run in runs) / len(runs),
        until_saved_s=sum(run.until_saved_s for run in runs) / len(runs),
        num_saved=runs[0].num_saved,
        num_operators=runs[0].num_operators,
        copied_bytes=runs[0].copied_bytes,
        saved_copies_bytes=runs[0].saved_copies_bytes,
    )


def _share_until(saved_s: float, operators: Sequence[Operator]) -> float:
    """The share of these operators' time that lies before the last tensor is saved; an operator saves before it runs,
    or what it has made."""
    total_s = sum(operator.end_s - operator.start_s for operator in operators)
    if total_s <= 0:
        return 1.0
    return sum(op.end_s - op.start_s for op in operators if op.start_s <= saved_s) / total_s
