"""The memory of the traced step as it would have been with some module calls checkpointed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memadvisor.analyzers.altered_curve import FOREVER_S, AlteredCurve, moved_death
from memadvisor.analyzers.checkpoint_frames import MODEL_STATES, Frame, TracedCalls
from memadvisor.analyzers.timeline import MemoryTimeline

# torch.get_rng_state() on the processor, which each checkpoint keeps and its second run copies once more.
_RANDOM_STATE_BYTES = 5056

BY_CHECKPOINT = "input of the checkpoint"
BY_OTHERS = "saved by other modules"
BY_SCRIPT = "held outside autograd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """`freed_bytes`: what is not alive, and otherwise would be, when the backward of a micro-batch begins
    (of the micro-batch where it is most; negative where the checkpoint keeps more than it drops).

    `still_kept_bytes`: what the calls save and nevertheless stays, by who keeps it. `growth_bytes`: how much
    higher the step's peak gets (negative: lower); `peak_s` is the new peak's moment, on the process's clock,
    `peaks_again` whether a second run makes it.
    """

    freed_bytes: int
    still_kept_bytes: dict[str, int]
    growth_bytes: int
    peak_s: float
    peaks_again: bool


def outermost(frames: Iterable[Frame]) -> list[Frame]:
    """Without the frames that lie inside another one; in order of start."""
    found: list[Frame] = []
    for frame in sorted(frames, key=lambda f: (f.call.start_s, -f.call.end_s)):
        if not found or frame.call.start_s >= found[-1].call.end_s:
            found.append(frame)
    return found


def checkpoint_effect(traced: TracedCalls, timeline: MemoryTimeline, frames: Sequence[Frame]) -> Effect:
    """Checkpoint these calls, which must not lie in one another, and replay the step's bytes.

    The new curve is the old one, less each freed storage between its last use in the forward and its
    death, plus the copies from the second run to their release, plus the second runs' own levels.
    """
    changes, still_kept = _moved(traced, frames)
    on_processor = traced.rank.process.device == "cpu"
    state_bytes = _RANDOM_STATE_BYTES if on_processor else 0
    for frame in frames:
        changes += [(frame.call.start_s, state_bytes), (frame.end_s, -state_bytes)]
        for again_s, copies in frame.second_runs:
            for copy in copies:
                changes += [(again_s, copy.size_bytes), (copy.until_s, -copy.size_bytes)]
    curve = AlteredCurve(timeline, changes)
    peak_bytes, peak_s = curve.highest()
    peaks_again = False
    for frame in frames:
        for again_s, _ in frame.second_runs:
            level = curve.before(again_s) + frame.highest_bytes + state_bytes
            if level > peak_bytes:
                peak_bytes, peak_s, peaks_again = level, again_s, True
    return Effect(
        freed_bytes=max(-curve.change_at(traced.backward_after(frame.call.end_s)) for frame in frames),
        still_kept_bytes=dict(still_kept),
        growth_bytes=peak_bytes - int(timeline.total_bytes.max()),
        peak_s=peak_s,
        peaks_again=peaks_again,
    )


def _moved(traced: TracedCalls, frames: Sequence[Frame]) -> tuple[list[tuple[float, int]], Counter[str]]:
    """Changes of live bytes where the first run's storages die earlier, or arguments later."""
    dropped = {id(save) for frame in frames for save in frame.saves}
    arguments: dict[int, float] = {}
    for frame in frames:
        for storage_id in frame.inputs & traced.storages.keys():
            arguments[storage_id] = max(frame.end_s, arguments.get(storage_id, 0.0))
    touched = dict.fromkeys(save.storage_id for frame in frames for save in frame.saves)
    changes: list[tuple[float, int]] = []
    still_kept: Counter[str] = Counter()
    for storage_id in (*touched, *(number for number in arguments if number not in touched)):
        storage = traced.storages[storage_id]
        if storage.phase == "baseline" or storage.category in MODEL_STATES:
            continue
        death_s = FOREVER_S if storage.death_s is None else storage.death_s
        others = [save for save in traced.saves_of[storage_id] if id(save) not in dropped]
        holders = {
            BY_CHECKPOINT: arguments.get(storage_id, 0.0),
            BY_OTHERS: traced.released_s(others),
            BY_SCRIPT: death_s if _is_held(traced, storage_id) else 0.0,
        }
        until_s = max(traced.forward_end_s(storage), *holders.values())
        if others and until_s == holders[BY_OTHERS] >= traced.released_s(traced.saves_of[storage_id]):
            until_s = max(
                death_s, *holders.values()
            )  # a release is followed by the death within microseconds
        if storage_id in touched and until_s >= death_s:
            still_kept[max(holders, key=lambda name: holders[name])] += storage.size_bytes
        changes += moved_death(storage, until_s)
    return changes, still_kept


def _is_held(traced: TracedCalls, storage_id: int) -> bool:
    return traced.is_held_elsewhere(traced.storages[storage_id])
