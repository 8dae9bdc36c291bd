"""A simulation's lanes as a plan keeps them: what is too short to be seen is joined with what is like it beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memadvisor.cost.simulation import Simulation
from memadvisor.plan import LaneInterval

_SEEN = 1 / 2000  # of the step: shorter is under a pixel of a wide page


def timeline_of(played: Simulation) -> tuple[LaneInterval, ...]:
    """What each lane does when, before what was learnt has scaled the parts of the step's time."""
    lanes = played.lanes
    intervals = [
        LaneInterval(each.lane.value, each.label, max(0.0, each.start_s), each.end_s)
        for each in lanes.intervals
    ]
    end_s = max((each.end_s for each in intervals), default=0.0)
    return tuple(
        LaneInterval(each.lane, each.label, _short(each.start_s), _short(each.end_s))
        for each in joined(intervals, end_s)
    )


def joined(intervals: Iterable[LaneInterval], step_s: float) -> list[LaneInterval]:
    """By lane, in order of start; runs of short ones of one kind (the first word of their labels) as one."""
    least_s = step_s * _SEEN
    by_lane: dict[str, list[LaneInterval]] = {}
    for each in intervals:
        if each.end_s > each.start_s:
            by_lane.setdefault(each.lane, []).append(each)
    found = []
    for members in by_lane.values():
        found += _joined_lane(sorted(members, key=lambda each: (each.start_s, -each.end_s)), least_s)
    return found


def _joined_lane(members: Sequence[LaneInterval], least_s: float) -> list[LaneInterval]:
    rows: list[LaneInterval] = []
    is_run = False  # the last row is made of short ones alone, and another may join it
    for each in members:
        is_short = each.end_s - each.start_s < least_s
        if (
            rows
            and each.start_s - rows[-1].end_s < least_s
            and _go_together(rows[-1], each, is_run and is_short)
        ):
            label = each.label if rows[-1].label == each.label else f"{kind_word(each.label)} of several"
            end_s = max(rows[-1].end_s, each.end_s)
            rows[-1] = LaneInterval(each.lane, label, rows[-1].start_s, end_s)
        else:
            rows.append(each)
            is_run = is_short
    return rows


def _go_together(before: LaneInterval, after: LaneInterval, are_short: bool) -> bool:
    return before.label == after.label or (are_short and kind_word(before.label) == kind_word(after.label))


def kind_word(label: str) -> str:
    """`forward` of `forward of blocks.3`."""
    return label.partition(" ")[0]


def _short(seconds: float) -> float:
    """Six digits."""
    return float(f"{seconds:.6g}")
