"""What is asked of a run, held against what it measured: the gate that stands after a profile in continuous integration.

A figure of several ranks is that of the worst one, which is named. What was not recorded does not hold: no gate is passed
by a figure that nobody knows. And nothing holds of a run whose record is not whole: the steps that are missing may have
been the ones that took most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from memadvisor.analyzers.analysis import Analysis, RankAnalysis
from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.comparison import Compared
from memadvisor.analyzers.larger_steps import LargerSteps
from memadvisor.analyzers.run_difference import RankDifference, run_difference
from memadvisor.run.run import RankRun

Quantity = Literal["bytes", "seconds", "fraction"]
MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is asked; None: it is not. Fractions are of 1.

    `max_exposed_communication` is of the traced step's time, `max_unexplained` of the peak, `max_prediction_error` of
    what was measured, `max_growth` of the baseline's peak and `max_slowdown` of its median step. `convention` is that
    of `min_mfu`.
    """

    max_peak_bytes: int | None = None
    max_reserved_bytes: int | None = None
    min_mfu: float | None = None
    min_hfu: float | None = None
    max_step_time_s: float | None = None
    max_exposed_communication: float | None = None
    max_unexplained: float | None = None
    max_prediction_error: float | None = None
    max_growth: float | None = None
    max_slowdown: float | None = None
    convention: str = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One figure against its limit. `option` is the limit's name in Limits; `figure` says in words what was measured.

    `measured` is the worst rank's of those that recorded it, `rank` whose it is, and `where` it was measured; all of a run
    as a whole has no rank. `unknown` says which ranks did not record it, and why: then the gate does not hold.
    """

    option: str
    figure: str
    quantity: Quantity
    is_maximum: bool
    limit: float
    measured: float | None
    rank: int | None
    holds: bool
    where: str
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All gates, and what is missing of the record (empty: it is whole)."""

    gates: tuple[Gate, ...]
    missing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.missing and all(gate.holds for gate in self.gates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one rank measured (None: it did not), and where or why not, in words."""

    rank: int | None
    value: float | None
    why: str = ""


def judge(analysis: Analysis, limits: Limits, baseline: Analysis | None = None) -> Judgement:
    """Hold a run against its limits. `baseline`: the run that `max_growth` and `max_slowdown` start from."""
    gates = [*_memory(analysis, limits), *_time(analysis, limits), *_predicted(analysis, limits)]
    if baseline is not None:
        gates += _since(analysis, limits, baseline)
    return Judgement(gates=tuple(gates), missing=tuple(missing_from(analysis)))


def hold(option: str, figure: str, quantity: Quantity, limit: float, figures: Sequence[Figure]) -> Gate:
    """One gate over all ranks: `max_...` holds if no rank is above `limit`, `min_...` if none is below."""
    is_maximum = option.startswith("max_")
    known = [(each.value, each) for each in figures if each.value is not None]
    unknown = [each for each in figures if each.value is None]
    pick = max if is_maximum else min
    worst_value, worst = pick(known, key=lambda pair: pair[0]) if known else (None, None)
    holds = worst_value is not None and (worst_value <= limit if is_maximum else worst_value >= limit)
    return Gate(
        option=option,
        figure=figure,
        quantity=quantity,
        is_maximum=is_maximum,
        limit=limit,
        measured=worst_value,
        rank=worst.rank if worst else None,
        holds=holds and not unknown,
        where=worst.why if worst else "",
        unknown=tuple(_absences(unknown)),
    )


def _absences(unknown: Sequence[Figure]) -> Iterator[str]:
    """`ranks 0, 1: no traced step was finished`: each reason once."""
    for why in dict.fromkeys(figure.why for figure in unknown):
        of_ranks = [figure.rank for figure in unknown if figure.why == why and figure.rank is not None]
        yield f"{numbered(of_ranks)}: {why}" if of_ranks else why


def numbered(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 more`."""
    named = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def _memory(analysis: Analysis, limits: Limits) -> Iterator[Gate]:
    ranks = analysis.ranks
    if limits.max_peak_bytes is not None:
        figures = [
            Figure(
                rank=r.rank,
                value=r.known_peak_bytes,
                why=_where_it_peaked(r, recorded, analysis.larger_steps),
            )
            for r, recorded in zip(ranks, analysis.run.ranks, strict=True)
        ]
        yield hold("max_peak_bytes", "peak", "bytes", limits.max_peak_bytes, figures)
    if limits.max_reserved_bytes is not None:
        figures = [
            Figure(rank=rank.rank, value=rank.highest_reserved_bytes, why=_why_not_reserved(rank, recorded))
            for rank, recorded in zip(ranks, analysis.run.ranks, strict=True)
        ]
        yield hold("max_reserved_bytes", "reserved", "bytes", limits.max_reserved_bytes, figures)
    if limits.max_unexplained is not None:
        figures = [
            Figure(
                rank=r.rank,
                value=r.peak.unexplained_fraction if r.peak else None,
                why="of the traced step's peak" if r.peak else recorded.why_untraced,
            )
            for r, recorded in zip(ranks, analysis.run.ranks, strict=True)
        ]
        yield hold("max_unexplained", "unexplained", "fraction", limits.max_unexplained, figures)


def _where_it_peaked(rank: RankAnalysis, recorded: RankRun, larger: LargerSteps | None) -> str:
    if rank.known_peak_bytes is None:
        return "no step with the allocator's count was finished"
    if rank.peak is None:
        return recorded.why_untraced if recorded.has_lost_trace else "no step was traced"
    is_traced = rank.known_peak_bytes == rank.peak.allocated_bytes
    if not is_traced:
        return "in another step than the traced one"
    untraced = "" if larger is None else f", step {larger.traced_step}; larger ones were not traced"
    return f"in {rank.peak.position}{untraced}"


def _why_not_reserved(rank: RankAnalysis, recorded: RankRun) -> str:
    if rank.highest_reserved_bytes is not None:
        return ""
    is_cpu = recorded.process.device == "cpu"
    return "a CPU's allocator keeps no such count" if is_cpu else "no step was finished"


def _time(analysis: Analysis, limits: Limits) -> Iterator[Gate]:
    ranks = analysis.ranks
    if limits.min_mfu is not None:
        figures = [_mfu(*pair, limits.convention) for pair in zip(ranks, analysis.run.ranks, strict=True)]
        yield hold("min_mfu", "MFU", "fraction", limits.min_mfu, figures)
    if limits.min_hfu is not None:
        figures = [
            Figure(rank=rank.rank, value=rank.utilization.hfu, why=_of_which_peak(rank, recorded))
            for rank, recorded in zip(ranks, analysis.run.ranks, strict=True)
        ]
        yield hold("min_hfu", "HFU", "fraction", limits.min_hfu, figures)
    if limits.max_step_time_s is not None:
        figures = [_step_time(rank) for rank in ranks]
        yield hold("max_step_time_s", "step time", "seconds", limits.max_step_time_s, figures)
    if limits.max_exposed_communication is not None:
        figures = [_exposed(*pair) for pair in zip(ranks, analysis.run.ranks, strict=True)]
        name = "exposed communication"
        yield hold("max_exposed_communication", name, "fraction", limits.max_exposed_communication, figures)


def _mfu(rank: RankAnalysis, recorded: RankRun, convention: str) -> Figure:
    chosen = rank.utilization.conventions[convention]
    why = chosen.reason or f"convention {convention}, {_of_which_peak(rank, recorded)}"
    if chosen.mfu is None and not chosen.reason:
        why = _of_which_peak(rank, recorded)
    return Figure(rank=rank.rank, value=chosen.mfu, why=why)


def _of_which_peak(rank: RankAnalysis, recorded: RankRun) -> str:
    """Against what utilization is measured, or why it cannot be."""
    used = rank.utilization
    if used.model_flops_per_step is None:
        return recorded.why_untraced
    if used.step_time_s is None:
        return "no timed step was finished"
    if used.peak_flops_per_s is None:
        of = f"no peak FLOP/s of {used.dtype or 'its dtype'} is known for {recorded.process.device_name}"
        return f"{of}; give --peak-tflops or --hardware"
    return f"against the peak of {used.hardware_name} ({used.hardware_kind}, {used.dtype})"


def _step_time(rank: RankAnalysis) -> Figure:
    time = rank.step_time
    if time is None:
        return Figure(rank=rank.rank, value=None, why="no timed step was finished")
    return Figure(rank=rank.rank, value=time.median_s, why=time.basis)


def _exposed(rank: RankAnalysis, recorded: RankRun) -> Figure:
    traffic = rank.communication
    if traffic is None:
        return Figure(rank=rank.rank, value=None, why=recorded.why_untraced)
    if traffic.exposed_fraction is None:
        is_cpu = recorded.process.device == "cpu"
        why = "no operation's end was seen" if is_cpu else "when a device computes cannot be seen"
        return Figure(rank=rank.rank, value=None, why=why)
    why = "of the traced step" if traffic.num_calls else "no communication in the traced step"
    return Figure(rank=rank.rank, value=traffic.exposed_fraction, why=why)


def _predicted(analysis: Analysis, limits: Limits) -> Iterator[Gate]:
    if limits.max_prediction_error is None:
        return
    compared = analysis.comparison
    pairs: list[tuple[str, Compared | None]] = [
        ("error of the predicted peak", None if compared is None else compared.peak_bytes),
        ("error of the predicted step time", None if compared is None else compared.step_time_s),
    ]
    if compared is not None and compared.reserved_bytes.predicted is not None:
        pairs.insert(1, ("error of the predicted reservation", compared.reserved_bytes))
    for name, pair in pairs:
        figure = _error(analysis, pair)
        if (
            compared is not None
            and pair is compared.step_time_s
            and compared.unsteady
            and figure.value is not None
        ):
            figure = replace(figure, why=f"{figure.why}; measured of {compared.unsteady}")
        yield hold("max_prediction_error", name, "fraction", limits.max_prediction_error, [figure])


def _error(analysis: Analysis, pair: Compared | None) -> Figure:
    """Of the run as a whole: the prediction is of its largest and its slowest rank."""
    if pair is None:
        why = "no plan was applied" if analysis.run.plan is None else "the plan predicts nothing"
        return Figure(rank=None, value=None, why=why)
    error = pair.error_fraction
    if error is None:
        why = "the plan does not predict it" if pair.predicted is None else "it was not measured"
        return Figure(rank=None, value=None, why=why)
    off = "too much" if error > 0 else "too little" if error < 0 else "exactly that"
    return Figure(rank=None, value=abs(error), why=f"predicted {off}")


def _since(analysis: Analysis, limits: Limits, baseline: Analysis) -> Iterator[Gate]:
    found = run_difference(baseline, analysis)
    absent = [
        Figure(rank=number, value=None, why="the baseline has no such rank")
        for number in found.ranks_only_after
    ]
    if limits.max_growth is not None:
        figures = [_growth(rank) for rank in found.ranks]
        yield hold("max_growth", "growth of the peak", "fraction", limits.max_growth, [*figures, *absent])
    if limits.max_slowdown is not None:
        figures = [_slowdown(rank) for rank in found.ranks]
        yield hold(
            "max_slowdown", "growth of the step time", "fraction", limits.max_slowdown, [*figures, *absent]
        )


def _growth(rank: RankDifference) -> Figure:
    change = rank.known_peak_bytes
    return Figure(rank=rank.rank, value=change.change_fraction, why=_why_no_change(change))


def _slowdown(rank: RankDifference) -> Figure:
    change = rank.step_time.median_s
    shift = rank.step_time.shift
    why = _why_no_change(change)
    if not why and shift is not None:
        why = {
            True: "more than the steps' own noise",
            False: "within the steps' own noise",
            None: "too few steps to tell it from noise",
        }[shift.is_significant]
    return Figure(rank=rank.rank, value=change.change_fraction, why=why)


def _why_no_change(change: Change[Any]) -> str:
    if change.before is None:
        return "the baseline did not record it"
    if change.after is None:
        return "this run did not"
    return "" if change.before else "the baseline has none"


def missing_from(analysis: Analysis) -> Iterator[str]:
    """What of the record is not there or not to be trusted, and how a rank ended that did not end well."""
    run = analysis.run
    if run.missing_ranks:
        yield f"{numbered(run.missing_ranks)}: no record"
    for late in analysis.unfinished_ranks[:MAX_NAMED]:
        steps = f"after {late.num_steps} step{'s' * (late.num_steps != 1)}"
        how = "still running" if late.is_alive else "no ending (killed?)"
        yield f"rank {late.rank}: {'recording stopped' if late.has_stopped else how} {steps}"
    ended = [(rank.process.rank, rank.ending) for rank in run.ranks if rank.ending is not None]
    failed = [(rank, end) for rank, end in ended if end.exit_code or end.exception]
    for number, end in failed[:MAX_NAMED]:
        raised = f" ({end.exception})" if end.exception else ""
        yield f"rank {number}: exit code {end.exit_code}{raised}"
    yield from run.problems
