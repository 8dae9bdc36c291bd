"""One change of the script, and the records that changes are found in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from memadvisor.analyzers.altered_curve import AlteredCurve
from memadvisor.analyzers.checkpoint_frames import TracedCalls
from memadvisor.analyzers.communication import Communication
from memadvisor.analyzers.data_waits import DataWaits
from memadvisor.analyzers.step_time import StepTime
from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.analyzers.utilization import Utilization
from memadvisor.hardware.hardware import Hardware
from memadvisor.run.records import Span, Step, Storage
from memadvisor.run.run import RankRun
from memadvisor.units import format_bytes, format_seconds

# Shares of the peak, and of a step, below which a change is not worth a reader's minute.
WORTH_OF_PEAK = 0.02
WORTH_OF_STEP = 0.02

LESS_PRECISION = "less precise"  # the effect of what gives up digits, and not their order alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptChange:
    """`seen` is what was measured, `change` what to write. What it would save is predicted, of this change alone.

    `peak_saved_bytes`: how much lower the traced step's peak gets; 0 where another moment is as high. `peak_is_rough`: what
    else the change moves is not known. `step_saved_s`: how
    much shorter the median step gets, at most so much where `is_at_most`. None: not predicted. `effect`: how results
    change ("not bit for bit the same"); "" where they do not.
    """

    kind: str
    seen: str
    change: str
    peak_saved_bytes: int | None = None
    peak_is_rough: bool = False
    step_saved_s: float | None = None
    is_at_most: bool = False
    effect: str = ""

    @property
    def is_lossy(self) -> bool:
        return self.effect == LESS_PRECISION

    @property
    def saved_in_words(self) -> str:
        """`peak -2.01 MiB, step at most -12.3 ms`; "" where nothing is predicted."""
        saved = []
        if self.peak_saved_bytes:
            saved.append(f"peak {'about ' * self.peak_is_rough}-{format_bytes(self.peak_saved_bytes)}")
        if self.step_saved_s:
            saved.append(f"step {'at most ' * self.is_at_most}-{format_seconds(self.step_saved_s)}")
        return ", ".join(saved)

    def share(self, peak_bytes: int, step_time_s: float | None) -> float:
        """Of the peak or of the step's time, whichever it saves more of."""
        of_peak = (self.peak_saved_bytes or 0) / peak_bytes if peak_bytes else 0.0
        of_step = (self.step_saved_s or 0.0) / step_time_s if step_time_s else 0.0
        return max(of_peak, of_step)

    @property
    def change_in_words(self) -> str:
        """What to write, and what of the results it changes."""
        return f"{self.change} Results: {self.effect}." if self.effect else self.change


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """A rank with a traced step, and what other analyzers say of it."""

    calls: TracedCalls
    timeline: MemoryTimeline
    time: StepTime | None
    communication: Communication | None
    utilization: Utilization | None
    hardware: Hardware | None
    waits: DataWaits | None

    @property
    def rank(self) -> RankRun:
        return self.calls.rank

    @property
    def step(self) -> Step:
        return self.calls.step

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.timeline.total_bytes.max())

    @cached_property
    def buckets(self) -> list[Storage]:
        """What DistributedDataParallel keeps for its messages, where that is not the gradients themselves."""
        return [
            storage
            for storage in self.calls.storages.values()
            if storage.category == "communication" and storage.phase == "baseline" and storage.death_s is None
        ]

    def peak_saved_bytes(self, changes: Iterable[tuple[float, int]]) -> int:
        """How much lower the peak is after changes of live bytes (altered_curve.py); negative where it is higher."""
        highest_bytes, _ = AlteredCurve(self.timeline, changes).highest()
        return self.peak_bytes - highest_bytes

    def is_worth(self, saved_bytes: int) -> bool:
        return saved_bytes >= WORTH_OF_PEAK * self.peak_bytes

    def spans(self, kind: str) -> list[Span]:
        """Those of the traced step, in order."""
        found = [span for span in self.rank.spans if span.step == self.step.index and span.kind == kind]
        return sorted(found, key=lambda span: span.start_s)


def in_words(storage: Storage) -> str:
    """`float32 [1024, 512], 2.00 MiB, of head`."""
    what = f"{storage.dtype} {storage.shape}, {format_bytes(storage.size_bytes)}"
    maker = storage.module or storage.operator.removeprefix("aten::")
    if storage.phase == "baseline":
        return f"{what}, of the step before"
    return f"{what}, of {maker}" if maker else what
