"""What changed from one run to another, rank by rank: both sides measured. comparison.py has prediction and measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from memadvisor.analyzers.activations import Activations
from memadvisor.analyzers.analysis import Analysis, RankAnalysis
from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.environment import Setting, differing_settings
from memadvisor.analyzers.operators import OperatorTable
from memadvisor.analyzers.peak_difference import PeakUnitChange, peak_units
from memadvisor.analyzers.saved_difference import SavedTensorChange, saved_tensors
from memadvisor.analyzers.step_time import StepTime
from memadvisor.analyzers.step_time_shift import Shift, shift
from memadvisor.run.records import CATEGORIES, UNEXPLAINED
from memadvisor.run.run import RankRun

PHASES = ("forward", "backward", "optimizer", "outside")
COMMUNICATION = ("time_s", "exposed_s", "waiting_s")
MODEL_STATES = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """What a module keeps for the backward in one micro-batch. `only_in`: the run ("before" or "after") whose model
    alone has a module of this name; "" where both have."""

    name: str
    saved_bytes: Change[int]
    only_in: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChange:
    """Calls of one operator in the traced steps, and their time; 0 calls where it did not run."""

    name: str
    num_calls: Change[int]
    time_s: Change[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeChange:
    """The median steady steps. `quartiles_s` are the first and third of each run's, None of fewer than two steps.
    `shift` says whether the difference is more than the steps' own noise. `data_wait_s` is part of `outside`."""

    median_s: Change[float]
    num_steps: Change[int]
    quartiles_s: tuple[tuple[float, float] | None, tuple[float, float] | None]
    shift: Shift | None
    by_phase_s: Mapping[str, Change[float]]
    data_wait_s: Change[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """One rank in both runs.

    `known_peak_bytes` and `reserved_bytes` are of all steps. `peak_bytes`, what it is made of, model states, what is
    saved, FLOPs, communication and operators are of the traced ones, whose times carry the tracing's cost. `modules`,
    `saved_tensors` and `operators` have those alone that differ, the largest difference first, and are None where either run
    recorded none; so is `peak_units`, which has all.
    """

    rank: int
    known_peak_bytes: Change[int]
    peak_bytes: Change[int]
    peak_position: tuple[str | None, str | None]
    reserved_bytes: Change[int]
    by_category_bytes: Mapping[str, Change[int]]
    num_params: Change[int]
    model_states: Mapping[str, Change[int]]
    peak_units: tuple[PeakUnitChange, ...] | None
    saved_bytes: Change[int]
    saved_tensors: tuple[SavedTensorChange, ...] | None
    step_time: StepTimeChange
    tokens_per_s: Change[float]
    samples_per_s: Change[float]
    communication_bytes: Change[int]
    num_collectives: Change[int]
    communication_s: Mapping[str, Change[float]]
    exposed_fraction: Change[float]
    model_flops_per_step: Change[int]
    executed_flops_per_step: Change[int]
    mfu: Change[float]
    hfu: Change[float]
    modules: tuple[ModuleChange, ...] | None
    operators: tuple[OperatorChange, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """Two runs side by side. `ranks` are those that both recorded; throughput is of all ranks together."""

    before: Analysis
    after: Analysis
    settings: tuple[Setting, ...]
    ranks: tuple[RankDifference, ...]
    ranks_only_before: tuple[int, ...]
    ranks_only_after: tuple[int, ...]
    tokens_per_s: Change[float]
    samples_per_s: Change[float]

    @property
    def are_of_one_kind(self) -> bool:
        return not any(setting.changes_kind for setting in self.settings)

    @property
    def largest_rank(self) -> RankDifference | None:
        """The rank with the highest peak in either run; None where the runs share none."""
        peaks = {rank.rank: rank.known_peak_bytes for rank in self.ranks}
        return max(
            self.ranks,
            key=lambda rank: max(peaks[rank.rank].before or 0, peaks[rank.rank].after or 0),
            default=None,
        )


def run_difference(before: Analysis, after: Analysis) -> RunDifference:
    """Put two runs side by side, also where they are of different kinds (`settings` says in what)."""
    first = {rank.rank: (rank, run) for rank, run in zip(before.ranks, before.run.ranks, strict=True)}
    second = {rank.rank: (rank, run) for rank, run in zip(after.ranks, after.run.ranks, strict=True)}
    return RunDifference(
        before=before,
        after=after,
        settings=differing_settings(before.run, after.run),
        ranks=tuple(
            _rank_difference(*first[number], *second[number]) for number in first if number in second
        ),
        ranks_only_before=tuple(number for number in first if number not in second),
        ranks_only_after=tuple(number for number in second if number not in first),
        tokens_per_s=Change(before=before.tokens_per_s, after=after.tokens_per_s),
        samples_per_s=Change(before=before.samples_per_s, after=after.samples_per_s),
    )


def _rank_difference(
    before: RankAnalysis, before_run: RankRun, after: RankAnalysis, after_run: RankRun
) -> RankDifference:
    def of(part: str, name: str) -> Change[Any]:
        """A figure of a part of the analysis that may not be there at all."""
        return Change(
            before=getattr(getattr(before, part), name, None), after=getattr(getattr(after, part), name, None)
        )

    return RankDifference(
        rank=before.rank,
        known_peak_bytes=Change(before=before.known_peak_bytes, after=after.known_peak_bytes),
        peak_bytes=of("peak", "allocated_bytes"),
        peak_position=(
            before.peak.position if before.peak else None,
            after.peak.position if after.peak else None,
        ),
        reserved_bytes=Change(before=before.highest_reserved_bytes, after=after.highest_reserved_bytes),
        by_category_bytes=_by_category(before, after),
        num_params=of("model_states", "num_params"),
        model_states={name: of("model_states", name) for name in MODEL_STATES},
        peak_units=peak_units(before.peak, after.peak),
        saved_bytes=of("activations", "saved_bytes"),
        saved_tensors=saved_tensors(before.activations, after.activations),
        step_time=_step_time(before.step_time, after.step_time),
        tokens_per_s=of("step_time", "tokens_per_s"),
        samples_per_s=of("step_time", "samples_per_s"),
        communication_bytes=of("communication", "bytes"),
        num_collectives=of("communication", "num_calls"),
        communication_s={name: of("communication", name) for name in COMMUNICATION},
        exposed_fraction=of("communication", "exposed_fraction"),
        model_flops_per_step=of("utilization", "model_flops_per_step"),
        executed_flops_per_step=of("utilization", "executed_flops_per_step"),
        mfu=of("utilization", "mfu"),
        hfu=of("utilization", "hfu"),
        modules=_modules(before.activations, before_run, after.activations, after_run),
        operators=_operators(before.operators, after.operators),
    )


def _by_category(before: RankAnalysis, after: RankAnalysis) -> dict[str, Change[int]]:
    """All categories at the peak; the two peaks may be at other places in the step."""
    sides = [
        {**rank.peak.by_category_bytes, UNEXPLAINED: rank.peak.unexplained_bytes} if rank.peak else {}
        for rank in (before, after)
    ]
    return {
        name: Change(before=sides[0].get(name), after=sides[1].get(name))
        for name in (*CATEGORIES, UNEXPLAINED)
    }


def _step_time(before: StepTime | None, after: StepTime | None) -> StepTimeChange:
    first, second = (() if time is None else time.durations_s for time in (before, after))

    def of_phase(time: StepTime | None, name: str) -> float | None:
        return None if time is None else time.by_phase_s[name]

    return StepTimeChange(
        median_s=Change(
            before=None if before is None else before.median_s,
            after=None if after is None else after.median_s,
        ),
        num_steps=Change(before=len(first), after=len(second)),
        quartiles_s=(_quartiles(first), _quartiles(second)),
        shift=shift(first, second),
        by_phase_s={
            name: Change(before=of_phase(before, name), after=of_phase(after, name)) for name in PHASES
        },
        data_wait_s=Change(
            before=None if before is None else before.data_wait_s,
            after=None if after is None else after.data_wait_s,
        ),
    )


def _quartiles(durations_s: Sequence[float]) -> tuple[float, float] | None:
    if len(durations_s) < 2:
        return None
    first, _, third = quantiles(durations_s, n=4, method="inclusive")
    return first, third


def _modules(
    before: Activations | None, before_run: RankRun, after: Activations | None, after_run: RankRun
) -> tuple[ModuleChange, ...] | None:
    if before is None or after is None:
        return None
    saved = [{row.name: row.saved_bytes for row in kept.modules} for kept in (before, after)]
    known = [
        {*sizes, *(module.name for module in run.modules)}
        for sizes, run in zip(saved, (before_run, after_run), strict=True)
    ]
    rows = [
        ModuleChange(
            name=name,
            # A module that the model has and that saved nothing keeps nothing.
            saved_bytes=Change(
                before=saved[0].get(name, 0 if name in known[0] else None),
                after=saved[1].get(name, 0 if name in known[1] else None),
            ),
            only_in=_only_in(name, before_run, known[0], after_run, known[1]),
        )
        for name in dict.fromkeys((*saved[0], *saved[1]))
    ]
    return tuple(sorted((row for row in rows if _differs(row.saved_bytes)), key=_size_of))


def _only_in(name: str, before_run: RankRun, before: set[str], after_run: RankRun, after: set[str]) -> str:
    """A run that lost its table of modules does not say which it had."""
    if name not in after and after_run.modules:
        return "before"
    return "after" if name not in before and before_run.modules else ""


def _size_of(row: ModuleChange) -> int:
    change = row.saved_bytes
    return -abs((change.after or 0) - (change.before or 0))


def _differs(change: Change[Any]) -> bool:
    return change.before != change.after


def _operators(
    before: OperatorTable | None, after: OperatorTable | None
) -> tuple[OperatorChange, ...] | None:
    if before is None or after is None:
        return None
    tables = [{row.name: row for row in found.by_operator} for found in (before, after)]
    calls, times = (
        [{name: getattr(row, field) for name, row in table.items()} for table in tables]
        for field in ("num_calls", "time_s")
    )
    rows = [
        OperatorChange(
            name=name,
            num_calls=Change(before=calls[0].get(name, 0), after=calls[1].get(name, 0)),
            time_s=Change(before=times[0].get(name, 0.0), after=times[1].get(name, 0.0)),
        )
        for name in dict.fromkeys((*tables[0], *tables[1]))
    ]
    differing = (row for row in rows if _differs(row.num_calls) or _differs(row.time_s))
    return tuple(sorted(differing, key=lambda row: -abs(row.time_s.difference or 0.0)))
