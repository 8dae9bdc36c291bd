"""Words for where in a step something is: `backward of blocks.3`."""

from __future__ import annotations

from memadvisor.schedule import Action
from memadvisor.stretches import Stretch

# Of phases that have no unit, in what is predicted and in what is measured.
PHASE_PLACES = {"optimizer": "optimizer step", "outside": "work outside forward, backward and optimizer"}


def place_in(phase: str, unit: str | None) -> str:
    """In a segment."""
    if phase in PHASE_PLACES:
        return PHASE_PLACES[phase]
    return f"{phase} outside any unit" if unit is None else f"{phase} of {unit or 'the model itself'}"


def pass_text(phase: str, micro_batch: int, stage: int | None) -> str:
    """A micro-batch's way through a stage of a pipeline; `stage` where a rank has several."""
    of_stage = "" if stage is None else f", stage {stage}"
    return f"{phase} of micro-batch {micro_batch}{of_stage}"


def second_run_of(stretch: Stretch) -> str:
    """Where units run again."""
    return f"recomputation of {stretch[0]}" + (f" to {stretch[-1]}" if len(stretch) > 1 else "")


def place_at(action: Action) -> str:
    """Where an action is done."""
    return f"{action.kind.value} of {action.unit or 'the model itself'}"
