"""Memory that a step leaves behind on top of what the step before left: with enough steps it runs out."""

from __future__ import annotations

from memadvisor.analyzers.checkpoint_frames import MODEL_STATES
from memadvisor.analyzers.script_changes.change import WORTH_OF_PEAK, Facts, ScriptChange, in_words
from memadvisor.run.records import Storage
from memadvisor.units import format_bytes

_SIZEABLE = 0.001  # of the peak


def growth(facts: Facts) -> ScriptChange | None:
    storages = [s for s in facts.calls.storages.values() if s.category not in MODEL_STATES]
    new = [s for s in storages if s.phase != "baseline" and s.death_s is None]
    gone = [s for s in storages if s.phase == "baseline" and s.death_s is not None]
    grown_bytes = sum(s.size_bytes for s in new) - sum(s.size_bytes for s in gone)
    # Where one takes the place of another, a larger batch makes it larger, and no step need follow that is larger still.
    has_more = _num_sizeable(facts, new) > _num_sizeable(facts, gone)
    if not has_more or grown_bytes < WORTH_OF_PEAK * facts.peak_bytes or not _goes_on(facts, grown_bytes):
        return None
    most = max(new, key=lambda storage: storage.size_bytes)
    return ScriptChange(
        kind="growth",
        seen=f"The traced step leaves {format_bytes(grown_bytes)} behind beyond what the step before left; the largest: "
        f"{in_words(most)}.",
        change="If that goes on (outputs or losses in a list, say), keep `x.item()` or `x.detach().cpu()` of them.",
    )


def _num_sizeable(facts: Facts, storages: list[Storage]) -> int:
    return sum(storage.size_bytes >= _SIZEABLE * facts.peak_bytes for storage in storages)


def _goes_on(facts: Facts, grown_bytes: int) -> bool:
    """False where later steps are known to end no higher than the traced one did."""
    ends = [
        step.allocated_bytes
        for step in facts.rank.steps
        if step.index > facts.step.index and step.allocated_bytes is not None
    ]
    if facts.step.allocated_bytes is None or not ends:
        return True
    return ends[-1] - facts.step.allocated_bytes >= 0.5 * grown_bytes * len(ends)
