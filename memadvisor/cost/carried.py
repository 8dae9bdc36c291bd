"""What one step leaves to the next: updated parameters on their way to all ranks.

Where units are updated one after another, those of the first ones begin to be gathered under the updates of the others.
One step is played for all, so what it ends with is played before it, too, for what is still under way then.
"""

from __future__ import annotations

from collections.abc import Callable

from memadvisor.cost.lanes import Carried, Lanes
from memadvisor.schedule import Action, ActionKind, Point, Schedule


def carry_over(
    schedule: Schedule, lanes: Lanes, update_s: Callable[[str], float], gather: Callable[[Action], None]
) -> Carried:
    """Queue what the step before has updated. `update_s`: of a unit by itself, or of all else ("")."""
    carried = Carried()
    if schedule.gathered_behind_updates:
        alone = schedule.updated_alone
        for action in schedule.at(Point.BEFORE_OPTIMIZER):
            if action.kind is ActionKind.GATHER:
                gather(action)
            elif action.unit in alone:
                lanes.compute(f"update of {action.unit}", update_s(action.unit))
        lanes.compute("optimizer step", update_s(""))
        carried = lanes.begin_step()
    for action in schedule.at(Point.AFTER_OPTIMIZER):
        if action.overlaps:
            gather(action)
    return carried
