"""All that can be said of a run: every analyzer's result, by rank and across ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memadvisor.analyzers.activations import Activations
from memadvisor.analyzers.communication import Communication
from memadvisor.analyzers.comparison import Comparison
from memadvisor.analyzers.model_states import ModelStates
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.skew import Skew
from memadvisor.analyzers.step_time import StepTime
from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.analyzers.utilization import Utilization

from memadvisor.hardware.hardware import Hardware
from memadvisor.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAnalysis:
    """One rank's results; what was not recorded is None."""

    rank: int
    timeline: MemoryTimeline | None
    peak: PeakBreakdown | None
    model_states: ModelStates | None
    activations: Activations | None
    step_time: StepTime | None
    utilization: Utilization
    communication: Communication | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """The results of a run's readable ranks, and across them. `hardware` is what utilization stands on.

    Throughput is of all ranks together; None where a rank of the run is missing or recorded none.
    """

    run: Run
    hardware: Hardware | None
    ranks: tuple[RankAnalysis, ...]
    skew: Skew | None
    comparison: Comparison | None
    samples_per_s: float | None
    tokens_per_s: float | None

    @property
    def largest_rank(self) -> RankAnalysis:
        """The rank with the highest peak; the first where no peak was recorded."""
        return max(self.ranks, key=lambda rank: rank.peak.allocated_bytes if rank.peak else -1)


def analyze(run: Run, hardware: Hardware | None = None) -> Analysis:
    """Run every analyzer."""
    raise NotImplementedError


def analysis_to_json(analysis: Analysis) -> dict[str, Any]:
    """The stable JSON of `memadvisor show --json` (docs/json.md)."""
    raise NotImplementedError
