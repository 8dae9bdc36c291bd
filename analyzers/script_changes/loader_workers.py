"""A training that stands still while its DataLoader makes the next batch.

Workers make batches in processes of their own, while the model trains on the ones before. What a step waits is the most that
they can save: they need cores, and each batch must still come over.
"""

from __future__ import annotations

from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.units import format_fraction, format_seconds

_WORTH_OF_STEP = 0.05


def loader_workers(facts: Facts) -> ScriptChange | None:
    time = facts.time
    waited_s = None if time is None else time.data_wait_s
    if time is None or waited_s is None or waited_s < _WORTH_OF_STEP * time.median_s:
        return None
    loaders = () if facts.waits is None else facts.waits.of_training
    workers = loaders[0].num_workers if loaders else None
    named = "" if workers is None else f", which has {workers or 'no'} worker{'s' * (workers != 1)}"
    return ScriptChange(
        kind="loader_workers",
        seen=f"A step waits {format_seconds(waited_s)}, {format_fraction(waited_s / time.median_s)} of it, for its "
        f"DataLoader{named}.",
        change="Make its batches beside the step: `DataLoader(..., num_workers=N)`."
        if not workers
        else "Give it more workers, where the machine has cores for them, or less to do for a sample.",
        step_saved_s=waited_s,
        is_at_most=True,
        effect="other random numbers where workers draw them" if not workers else "",
    )
