"""What playing a schedule gives, and who is told meanwhile what it does to memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from memadvisor.cost.lanes import Lanes
from memadvisor.cost.moments import Moment, Moments
from memadvisor.cost.step import Bytes
from memadvisor.plan import Prediction


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a schedule is predicted to give on one rank.

    `exposed_communication_s` is the part of `step_time_s` in which compute waits for collectives, `exposed_transfer_s`
    that in which it waits for other tiers; `components_s`: all of its parts (components.py), which what was learnt has
    scaled, as it has not the lanes. `sent_bytes`: what this rank sends in the step, if collectives send as rings do.
    `is_whole`: whether it was played to its end; else time and peak are the least that they can be.
    With local SGD times and bytes are those of the mean step of a period, after the steps before it.
    """

    step_time_s: float
    exposed_communication_s: float
    exposed_transfer_s: float
    components_s: Mapping[str, float]
    sent_bytes: int
    lanes: Lanes
    moments: Moments
    is_whole: bool = True

    @cached_property
    def peak_bytes(self) -> int:
        return self.moments.peak_bytes if len(self.moments) else 0

    @property
    def peak(self) -> Moment:
        return self.moments.peak

    def prediction(self) -> Prediction:
        peak = self.peak
        return Prediction(
            peak_bytes=peak.total_bytes,
            step_time_s=self.step_time_s,
            by_category_bytes={name: size for name, size in peak.by_category_bytes.items() if size},
            exposed_communication_s=self.exposed_communication_s,
            peak_position=peak.position,
            sent_bytes=self.sent_bytes,
            exposed_transfer_s=self.exposed_transfer_s,
            components_s=dict(self.components_s),
        )


class Watcher(Protocol):
    """Told, in order, what a simulation does to memory; `tensors` are EngineMemory's after it.

    place: words for where states change from here on, until a segment is told. states: with what is there `beside` only
    meanwhile. update: a unit's part of an optimizer step by itself, for which temporaries have the size that `share` of
    the captured step's is, where it is not known whose those are; with what is there `beside` only meanwhile.
    """

    def place(self, words: str) -> None: ...
    def states(self, tensors: Mapping[tuple[str, str], int], beside: Bytes = ...) -> None: ...
    def recomputation(self, position: int) -> None: ...
    def segment(self, position: int, tensors: Mapping[tuple[str, str], int], share: float) -> None: ...
    def update(self, unit: str, share: float, beside: Bytes = ...) -> None: ...
