"""Where a step's time goes: by phase and by unit, in timed steps alone."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """Median over steady steps of the time spent in one unit per step, all micro-batches together."""

    unit: str
    forward_s: float
    backward_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The median steady step: timed, neither warm-up nor next to a traced one.

    `by_phase_s` has forward, backward, optimizer and outside, each moment counted for the innermost phase;
    the first three are medians and `outside` is the rest, so that they sum to `median_s`. A recomputation
    counts as backward, as it runs there. Throughput is this rank's own.
    """

    median_s: float
    num_steps: int
    durations_s: tuple[float, ...]  # of the steady steps, in order
    by_phase_s: dict[str, float]
    units: tuple[UnitTime, ...]  # in order of first execution
    samples_per_s: float | None
    tokens_per_s: float | None
    recorder_fraction: float | None  # of step time, in memadvisor's own hooks
    traced_step_s: float | None  # for comparison: never part of a throughput figure


def step_time(rank: RankRun) -> StepTime | None:
    """Break the median steady step down. None when no timed step was finished."""
    raise NotImplementedError
