"""What a script's own checkpoints take of a step, and what its peak would be without them.

Where a forward runs again in the backward (`torch.utils.checkpoint`), what that leaves for the backward is what the first
run would have left, had it kept anything. So the curve of the traced step is raised by that from the first run of the unit to
the second one; and what second runs reach on their way is never there. A second run is seen by the calls of modules in it:
what it does beside them is known between two of them, and not before the first and after the last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memadvisor.analyzers.pieces import cut_step, typical_durations
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.records import ModuleCall, Step
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCheckpoints:
    """`units`: those of which anything runs again, in order; `again_s`: what that takes of a median step. `peak_bytes`: of
    the traced step if nothing ran again. Predicted."""

    units: tuple[str, ...]
    again_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _SecondRun:
    """From the first module's call in it to the end of the last one."""

    unit: str
    micro_batch: int
    start_s: float
    end_s: float
    forward_s: float  # when the last of its modules began, in the first run


def own_checkpoints(rank: RankRun) -> OwnCheckpoints | None:
    """None where no step was traced, or nothing of it ran again. Of a run without a plan: a plan's second runs count too."""
    step, timeline = rank.traced_step, memory_timeline(rank)
    runs = [] if step is None else _second_runs(rank, step)
    if step is None or timeline is None or not runs:
        return None
    changes = sorted(_changes(rank, step, runs))
    sums = np.concatenate(([0], np.cumsum([size_bytes for _, size_bytes in changes], dtype=np.int64)))
    changed_s = np.array([time_s for time_s, _ in changes])
    times_s = np.union1d(timeline.clock_s, changed_s)
    levels = timeline.total_bytes[np.searchsorted(timeline.clock_s, times_s, side="right") - 1]
    levels = levels + sums[np.searchsorted(changed_s, times_s, side="right")]
    begun = np.searchsorted([run.start_s for run in runs], times_s, side="right")
    is_within = begun > np.searchsorted([run.end_s for run in runs], times_s, side="right")
    units = {run.unit for run in runs}
    pieces = cut_step(rank.spans, step)
    durations, _ = typical_durations(rank, pieces)
    return OwnCheckpoints(
        units=tuple(unit.name for unit in rank.units if unit.name in units),
        again_s=sum(s for piece, s in zip(pieces, durations, strict=True) if piece.phase == "recompute"),
        peak_bytes=int(levels[~is_within].max()),
    )


def _second_runs(rank: RankRun, step: Step) -> list[_SecondRun]:
    """In order of time. Modules that are called again in the order of their first calls are of one run; the backward goes
    through several runs from the last one on."""
    first_s: dict[tuple[str, int], list[float]] = defaultdict(list)  # of what each module makes
    for row in rank.storages:
        if row.phase == "forward":
            first_s[row.module, row.micro_batch].append(row.birth_s)
    for times in first_s.values():
        times.sort()
    runs: list[_SecondRun] = []
    for call in _outermost(rank, step):
        times = first_s.get((call.module, call.micro_batch), [])
        last = runs[-1] if runs else None
        if last is not None and (last.unit, last.micro_batch) == (call.unit, call.micro_batch):
            position = bisect_right(times, last.forward_s)
            if not times or position < len(times):
                forward_s = times[position] if times else last.forward_s
                runs[-1] = replace(last, end_s=call.end_s, forward_s=forward_s)
                continue
        runs.append(
            _SecondRun(
                unit=call.unit,
                micro_batch=call.micro_batch,
                start_s=call.start_s,
                end_s=call.end_s,
                forward_s=times[0] if times else step.start_s,
            )
        )
    return runs


def _outermost(rank: RankRun, step: Step) -> list[ModuleCall]:
    """Calls of modules in the backward that lie in no other one."""
    found: list[ModuleCall] = []
    again = (
        c for c in rank.module_calls if c.phase == "recompute" and step.start_s <= c.start_s < step.end_s
    )
    for call in sorted(again, key=lambda call: (call.start_s, -call.end_s)):
        if not found or call.start_s >= found[-1].end_s:
            found.append(call)
    return found


def _changes(rank: RankRun, step: Step, runs: Sequence[_SecondRun]) -> list[tuple[float, int]]:
    """Each storage that a second run leaves for the backward, from the end of the first run on to where it is born.

    What is used after the run is left for the backward; the rest, such as what the second run returns, goes before, or is
    there already.
    """
    ended_s = _forward_ends(rank, step)
    starts = [run.start_s for run in runs]
    found = []
    for row in rank.storages:
        run = runs[max(0, bisect_right(starts, row.birth_s) - 1)]
        is_born = run.start_s <= row.birth_s <= run.end_s and row.device == rank.process.device
        if not is_born or row.category == "gradient" or (row.last_use_s or 0.0) <= run.end_s:
            continue
        ends = ended_s.get((run.unit, run.micro_batch), [])
        position = bisect_left(ends, run.forward_s)
        if position < len(ends):
            found += [(ends[position], row.size_bytes), (row.birth_s, -row.size_bytes)]
    return found


def _forward_ends(rank: RankRun, step: Step) -> Mapping[tuple[str, int], list[float]]:
    """By unit and micro-batch, when its forwards had ended."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in rank.spans:
        if span.step == step.index and span.kind in ("unit_forward", "forward"):
            found[span.unit, span.micro_batch].append(span.end_s)
    return {key: sorted(ends) for key, ends in found.items()}
