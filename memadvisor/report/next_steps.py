"""What to do next: changes with what they are predicted to save, then advice with the measured figure it stands on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from memadvisor.analyzers.data_ranks import num_data_ranks
from memadvisor.analyzers.data_waits import DataWaits
from memadvisor.analyzers.evaluation import Evaluation
from memadvisor.analyzers.first_changes import FirstChange
from memadvisor.analyzers.out_of_memory import way_on
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.step_time import StepTime
from memadvisor.report.data_waits import workers_in_words
from memadvisor.report.view import RankView
from memadvisor.report.words import ranks_in_words, unit_name
from memadvisor.units import counted, format_bytes, format_fraction, format_seconds

# A share below which a thing is not worth a reader's first minute.
WORTH_NAMING = 0.25
EXPOSED_WORTH_NAMING = 0.1
UNEXPLAINED_WORTH_NAMING = 0.05
# Of a model of 60 layers of 16 x 16 an operator takes 3 us of a CPU, with all around it, for 8 samples and 4 us for 512.
SMALL_OPERATOR_S = 10e-6
_MOSTLY = 0.5  # of what communication takes
_MANY_OPERATORS = 100

# Of each sort so many, that the whole is read in a minute.
_NUM_CHANGES = 3
_NUM_FACTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """One sentence or two; `saves`: what a change is predicted to save, "" of what is no change or has no prediction."""

    text: str
    saves: str = ""


def next_steps(view: RankView) -> list[NextStep]:
    """What stands in the way of trust, then what saves most, then what else the figures say; never empty."""
    trouble = [NextStep(text=text) for text in _trouble(view)]
    changes = [
        NextStep(text=_in_full(each), saves=each.saved_in_words)
        for each in view.analysis.first_changes(view.result)[:_NUM_CHANGES]
    ]
    facts = [NextStep(text=text) for text in (*_memory(view), *_time(view))]
    commands = [NextStep(text=text) for text in _command(view)]
    return [*trouble, *changes, *facts[:_NUM_FACTS], *commands]


def _in_full(change: FirstChange) -> str:
    found, row = change.script_change, change.checkpoint
    if found is not None:
        return f"{found.seen} {found.change_in_words}"
    them = "each of them" if row is not None and len(row.modules) > 1 else "it"
    return (
        f"{change.what[0].upper()}{change.what[1:]}: run {them} again in the backward in place of keeping what autograd "
        f"keeps. Results stay the same. `advise` finds which of all units to run again for a budget."
    )


def _trouble(view: RankView) -> Iterator[str]:
    run = view.analysis.run
    if run.missing_ranks:
        missing = ranks_in_words(run.missing_ranks, most=8)
        yield f"{missing.capitalize()} left no record: figures across ranks are incomplete."
    way = way_on(run)
    if way is not None:
        yield f"Memory ran out before a step was traced: {way}"
    elif view.recorded.has_lost_trace:
        yield "The traced step's record is lost, so memory is not explained: profile the script again."
    elif view.recorded.traced_step is None:
        # More steps of a script that takes none would explain nothing.
        warnings = [note.text for note in view.recorded.notes if note.level == "warning"]
        said = " ".join(warnings) if not view.recorded.steps else ""
        if run.problems:
            said = said or "No traced step is in what can be read of this run: profile the script again."
        option = view.recorded.trace_option
        other = f", or with `{option}`" if option else ""
        yield said or f"No step was traced, so memory is not explained: profile a run of more steps{other}."
    if view.analysis.larger_steps is not None:
        yield view.analysis.larger_steps.in_words
    compared = view.analysis.comparison
    if compared is not None and compared.other_micro_batch is not None:
        yield compared.other_micro_batch
    if compared is not None and compared.other_speed is not None:
        yield compared.other_speed
    if compared is not None and compared.within_budget is False and not compared.micro_batch_size.differs:
        yield (
            f"The budget of {format_bytes(compared.budget_bytes)} did not hold "
            f"({format_bytes(compared.peak_bytes.measured)} measured): advise again on the plain run, "
            "for as much less as this one took more."
        )


def _memory(view: RankView) -> Iterator[str]:
    peak, kept, states = view.result.peak, view.result.activations, view.result.model_states
    if peak is None or peak.allocated_bytes <= 0:
        return
    shares = {name: size / peak.allocated_bytes for name, size in peak.by_category_bytes.items()}
    is_chunkable = any(change.kind == "chunked_loss" for change in view.result.script_changes)
    temporary = _temporaries(peak, shares["temporary"], is_chunkable=is_chunkable)
    if temporary and shares["temporary"] >= max(shares.values()):
        yield temporary
    yield from own_tensors(view)
    if shares["activation"] >= WORTH_NAMING:
        # Of one alone, as of a compiled model, it says nothing.
        most = max(kept.units, key=lambda unit: unit.saved_bytes) if kept and len(kept.units) > 1 else None
        where = f" {unit_name(most.name)} keeps most, {format_bytes(most.saved_bytes)}." if most else ""
        yield (
            f"Activations are {format_fraction(shares['activation'])} of the peak.{where} "
            "A smaller micro-batch shrinks them all."
        )
    held = shares["parameter"] + shares["gradient"] + shares["optimizer_state"]
    num_ranks = num_data_ranks(view.recorded)
    if held >= WORTH_NAMING and states is not None and num_ranks > 1 and max(states.zero_stages) < 3:
        stage = max(states.zero_stages)
        yield (
            f"Model states are {format_fraction(held)} of the peak, held at ZeRO stage {stage}: "
            f"a higher stage shards more of them over the {num_ranks} ranks."
        )
    elif held >= WORTH_NAMING:
        yield (
            f"Model states (parameters, gradients, optimizer state) are {format_fraction(held)} of the peak"
            f"{_fewer_states(view)}"
        )
    if temporary and shares["temporary"] < max(shares.values()):
        yield temporary
    if peak.unexplained_bytes >= UNEXPLAINED_WORTH_NAMING * peak.allocated_bytes:
        share = format_fraction(peak.unexplained_bytes / peak.allocated_bytes)
        yield f"{share} of the peak is unexplained: read the notes before you trust the rest."


def own_tensors(view: RankView) -> Iterator[str]:
    """Where much of the peak is no training's: what the script holds beside it, which no plan moves."""
    peak = view.result.peak
    size_bytes = 0 if peak is None else peak.by_category_bytes["other"]
    if peak is None or size_bytes < WORTH_NAMING * peak.allocated_bytes or not size_bytes:
        return
    largest = next((storage for storage in peak.largest if storage.category == "other"), None)
    most = (
        ""
        if largest is None
        else f"; the largest takes {format_bytes(largest.size_bytes)} ({largest.dtype} {largest.shape})"
    )
    yield (
        f"{format_fraction(size_bytes / peak.allocated_bytes)} of the peak is other, tensors that the script holds beside the "
        f"training{most}. No plan moves them: read a data set batch by batch, `del` what is not used any more."
    )


def _fewer_states(view: RankView) -> str:
    """What leaves a rank fewer model states."""
    if view.recorded.pipeline_stages:
        return ": a pipeline of more stages leaves each rank fewer of them."
    if view.recorded.tensor_parallel:
        return ": layers split over more ranks leave each fewer of them."
    where = "on disk" if view.recorded.process.device == "cpu" else "in the host's memory"
    if view.recorded.shard_groups:
        return f": more ranks leave each fewer of them, and a plan may keep optimizer state {where} (`advise --hardware`)."
    return f"; ZeRO shards them over data-parallel ranks, and a plan may keep some {where} (`advise --hardware`)."


def _temporaries(peak: PeakBreakdown, share: float, *, is_chunkable: bool) -> str:
    """What is most of them, where they are much of the peak; else nothing."""
    largest = next((storage for storage in peak.largest if storage.category == "temporary"), None)
    if share < WORTH_NAMING or largest is None:
        return ""
    operator = largest.operator.removeprefix("aten::")
    made = f", made by {operator}" if operator else ""
    where = f"in {largest.module}" if largest.module else "outside any module"
    way = (
        "Logits and loss of some rows at a time (`--chunked-loss auto`), or a smaller micro-batch, shrink what is born and "
        "dies around them."
        if is_chunkable
        else "No plan frees what is born and dies inside one part of the computation: make it of fewer samples or tokens at "
        "once, in a smaller micro-batch or in parts."
    )
    return (
        f"Temporaries are {format_fraction(share)} of the peak; the largest takes {format_bytes(largest.size_bytes)} "
        f"({largest.dtype} {largest.shape}{made}, {where}). {way}"
    )


def _time(view: RankView) -> Iterator[str]:
    time, skew = view.result.step_time, view.analysis.skew
    if time is not None and time.median_s > 0:
        yield from _outside(time, view.result.data_waits, view.result.evaluation)
    yield from slow_parts(view)
    if skew is not None and skew.straggler is not None:
        spread = skew.compute_spread
        if spread is not None and spread >= EXPOSED_WORTH_NAMING:
            yield (
                f"Ranks compute unevenly (spread {format_fraction(spread)}); "
                f"the others wait most for rank {skew.straggler}."
            )


def slow_parts(view: RankView) -> Iterator[str]:
    """What makes a step long that no change of the script with a prediction shortens."""
    step, traffic = view.recorded.traced_step, view.result.communication
    exposed_s = None if traffic is None else traffic.exposed_s
    if step is not None and exposed_s is not None and exposed_s >= EXPOSED_WORTH_NAMING * step.duration_s:
        share = format_fraction(exposed_s / step.duration_s)
        yield f"Communication without compute beside it takes {share} of the traced step{_less_exposed(view)}"
    yield from _small_operators(view)


def _less_exposed(view: RankView) -> str:
    if view.recorded.pipeline_stages:
        return ". Much of that in a pipeline is waiting for another stage: more micro-batches, or evener stages, shorten it."
    if view.recorded.tensor_parallel:
        return "."
    if waited := _mostly_waiting(view):
        return waited
    way = ": more micro-batches between two updates, or larger ones, make it a smaller share"
    states = view.result.model_states
    is_whole = view.analysis.run.plan is None and states is not None and states.zero_stages == (0,)
    fewer = "; `run --all-reduce-bits 8` sends fewer bytes (lossy)" if is_whole else ""
    return f"{way}{fewer}."


def _mostly_waiting(view: RankView) -> str:
    """Where messages are short and ranks come late to them, which no smaller message mends."""
    traffic, skew = view.result.communication, view.analysis.skew
    if traffic is None or not traffic.time_s or (traffic.waiting_s or 0.0) < _MOSTLY * traffic.time_s:
        return ""
    late = None if skew is None else skew.straggler
    whom = f", most for rank {late}" if late is not None and late != view.result.rank else ""
    return (
        f"; {format_fraction((traffic.waiting_s or 0.0) / traffic.time_s)} of all communication is waiting for other ranks"
        f"{whom}: look at what makes them late (data, logging, a busier or slower machine), as smaller messages shorten the rest "
        "alone."
    )


def _small_operators(view: RankView) -> Iterator[str]:
    """Of a CPU: how far a device is behind the host is another question there, and starting operators costs otherwise."""
    time, operators = view.result.step_time, view.recorded.operators
    if time is None or view.recorded.process.device != "cpu" or len(operators) < _MANY_OPERATORS:
        return
    each_s = time.median_s / len(operators)
    if each_s < SMALL_OPERATOR_S:
        yield (
            f"A step runs {len(operators)} operators, {format_seconds(each_s)} each: much of that is what starting one takes, "
            "and no arithmetic. A larger micro-batch gives each more to do."
        )


def _outside(time: StepTime, waits: DataWaits | None, seen: Evaluation | None) -> Iterator[str]:
    """What of a step is in no phase: waiting for data, as far as that is known, and the rest."""
    waited_s, outside_s = time.data_wait_s, time.by_phase_s["outside"]
    is_known = waited_s is not None and waits is not None
    if waited_s is not None and waits is not None and waited_s >= EXPOSED_WORTH_NAMING * time.median_s:
        name = "DataLoader" if len(waits.of_training) == 1 else "DataLoaders"
        yield (
            f"{format_fraction(time.data_wait_fraction)} of a step ({format_seconds(waited_s)}) is waiting for the {name} "
            f"({workers_in_words(waits)}): look at data loading."
        )
    rest_s = outside_s - (waited_s or 0.0)
    if rest_s >= WORTH_NAMING * time.median_s:
        beside = " and not waiting for a DataLoader" if is_known else ""
        where = "logging, metrics and copies to the device" if is_known else "data loading and logging"
        if seen is not None and seen.num_calls:
            steps = counted(seen.num_steps, "timed step")
            where = f"evaluations ({format_seconds(seen.time_s)} in {steps}), {where}"
        yield (
            f"{format_fraction(rest_s / time.median_s)} of a step ({format_seconds(rest_s)}) is outside "
            f"forward, backward and optimizer{beside}: look at {where}."
        )


def _command(view: RankView) -> Iterator[str]:
    if view.result.peak is None:
        return
    if view.analysis.run.plan is not None:
        yield "A plan was applied here: others are ranked from a run of the script without one."
        return
    where = shlex.quote(str(view.analysis.run.path))
    yield f"Rank plans under a budget: `memadvisor advise {where} --memory SIZE -o plan.json`."
