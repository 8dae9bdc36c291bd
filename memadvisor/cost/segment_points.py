"""At which of a schedule's boundaries a segment of the step begins and ends; what is played there of units that lend it a module.

A unit whose parameters are freed comes in for a call of a module of it, whoever calls that: it goes behind a forward, and
with its own backward. What the schedule brings in ahead there comes with calls of the unit itself alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from memadvisor.cost.step import Segment
from memadvisor.schedule import Action, ActionKind, Point, Schedule

Lent = tuple[Point, Action]

POINTS = {
    "forward": (Point.BEFORE_FORWARD, Point.AFTER_FORWARD),
    "backward": (Point.BEFORE_BACKWARD, Point.AFTER_BACKWARD),
    "optimizer": (Point.BEFORE_OPTIMIZER, Point.AFTER_OPTIMIZER),
}
AFTER = tuple(after for _, after in POINTS.values())
# A reduction may run under the rest of a backward, whose end waits for all of them.
PASSES = {"forward": "forward", "backward": "backward", "recompute": "backward"}


def lent_before(schedule: Schedule, segment: Segment) -> Iterator[Lent]:
    """What brings in the units that lend a segment modules."""
    if segment.lenders:
        yield from _lent(schedule, segment, POINTS[segment.phase][0], ActionKind.GATHER)


def lent_after(schedule: Schedule, segment: Segment) -> Iterator[Lent]:
    """What frees them behind it, and what follows the backward of those that have none of their own."""
    if segment.phase == "forward":
        yield from _lent(schedule, segment, Point.AFTER_FORWARD, ActionKind.RELEASE)
    for name in segment.loans_ended:
        for action in schedule.at(Point.AFTER_BACKWARD, name):
            yield Point.AFTER_BACKWARD, action


def _lent(schedule: Schedule, segment: Segment, point: Point, kind: ActionKind) -> Iterator[Lent]:
    for name in segment.lenders:
        for action in schedule.at(point, name):
            if action.kind is kind and not action.overlaps:
                yield point, action
