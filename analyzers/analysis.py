"""All that can be said of a run: every analyzer's result, by rank and across ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memadvisor.analyzers.activations import Activations, activations
from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.analyzers.checkpointing import CheckpointedModule, Checkpointing, checkpointing
from memadvisor.analyzers.clocks import align_clocks
from memadvisor.analyzers.communication import Communication, communication
from memadvisor.analyzers.comparison import Compared, Comparison, comparison
from memadvisor.analyzers.data_ranks import over_all_ranks
from memadvisor.analyzers.data_waits import DataWaits, data_waits
from memadvisor.analyzers.evaluation import Evaluation, evaluation
from memadvisor.analyzers.first_changes import FirstChange, first_changes
from memadvisor.analyzers.fragmentation import Fragmentation, fragmentation
from memadvisor.analyzers.larger_steps import LargerSteps, larger_steps
from memadvisor.analyzers.matching import Matched, match_collectives
from memadvisor.analyzers.model_states import ModelStates, model_states
from memadvisor.analyzers.operators import OperatorTable, operator_table
from memadvisor.analyzers.out_of_memory import OutOfMemoryEvent, out_of_memory
from memadvisor.analyzers.peak import PeakBreakdown, peak_breakdown
from memadvisor.analyzers.pipeline_passes import with_micro_batches_apart
from memadvisor.analyzers.roofline import Roofline, roofline
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import script_changes
from memadvisor.analyzers.sides import Key
from memadvisor.analyzers.skew import Skew, skew
from memadvisor.analyzers.step_time import StepTime, step_time
from memadvisor.analyzers.timeline import MemoryTimeline, memory_timeline
from memadvisor.analyzers.unfinished import UnfinishedRank, unfinished_ranks
from memadvisor.analyzers.utilization import Utilization, utilization
from memadvisor.hardware.hardware import Hardware
from memadvisor.run.records import CATEGORIES, Step
from memadvisor.run.run import RankRun, Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAnalysis:
    """One rank's results; what was not recorded is None.

    `highest_peak_bytes` is the highest of all steps' allocator peaks, also where no step was traced. On CPU
    only the traced step has one. `highest_reserved_bytes` likewise: the most that the allocator held from the device.
    """

    rank: int
    highest_peak_bytes: int | None
    highest_reserved_bytes: int | None
    timeline: MemoryTimeline | None
    peak: PeakBreakdown | None
    model_states: ModelStates | None
    activations: Activations | None
    checkpointing: Checkpointing | None
    step_time: StepTime | None
    utilization: Utilization
    communication: Communication | None
    fragmentation: Fragmentation | None
    out_of_memory: tuple[OutOfMemoryEvent, ...] = ()
    operators: OperatorTable | None = None
    roofline: Roofline | None = None
    evaluation: Evaluation | None = None
    script_changes: tuple[ScriptChange, ...] = ()
    data_waits: DataWaits | None = None

    @property
    def known_peak_bytes(self) -> int | None:
        """The highest peak of any step; where the allocator kept none, the traced step's largest sum of storages."""
        if self.highest_peak_bytes is None and self.peak is not None:
            return self.peak.allocated_bytes
        return self.highest_peak_bytes


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
    unfinished_ranks: tuple[UnfinishedRank, ...] = ()
    larger_steps: LargerSteps | None = None

    def first_changes(self, result: RankAnalysis) -> tuple[FirstChange, ...]:
        """Of checkpoints and changes of the script those that save a rank most; none where no step was traced, or a plan was
        applied: then its prediction and the measurement are compared."""
        if self.run.plan is not None or result.peak is None:
            return ()
        time_s = None if result.step_time is None else result.step_time.median_s
        return first_changes(result.checkpointing, result.script_changes, result.peak.allocated_bytes, time_s)

    @property
    def largest_rank(self) -> RankAnalysis:
        """The rank with the highest peak; the first where no peak was recorded."""
        return max(self.ranks, key=lambda rank: rank.peak.allocated_bytes if rank.peak else -1)


def analyze(run: Run, hardware: Hardware | None = None) -> Analysis:
    """Run every analyzer. Without `hardware` there are FLOPs but no MFU."""
    clocks = align_clocks(run.ranks)
    matched = match_collectives(run.ranks, clocks)
    ranks = tuple(_analyze_rank(rank, run, hardware, matched) for rank in run.ranks)
    times = [rank.step_time for rank in ranks]
    peaks = [rank.peak for rank in ranks]
    return Analysis(
        run=run,
        hardware=hardware,
        ranks=ranks,
        skew=skew(run.ranks, clocks, matched, times, [rank.communication for rank in ranks], peaks),
        comparison=comparison(
            run.plan,
            peaks,
            times,
            [rank.communication for rank in ranks],
            [rank.rank for rank in ranks],
            *_micro_batches(run.traced_step),
        ),
        samples_per_s=over_all_ranks([None if t is None else t.samples_per_s for t in times], run),
        tokens_per_s=over_all_ranks([None if t is None else t.tokens_per_s for t in times], run),
        unfinished_ranks=unfinished_ranks(run),
        larger_steps=larger_steps(run.ranks),
    )


def _analyze_rank(
    rank: RankRun, run: Run, hardware: Hardware | None, matched: Mapping[Key, Matched]
) -> RankAnalysis:
    rank = with_micro_batches_apart(rank) if rank.pipeline_stages else rank
    timeline = memory_timeline(rank)
    time = step_time(rank)
    peak = peak_breakdown(rank, timeline)
    used = utilization(rank, time, hardware)
    traffic, waits = communication(rank, matched), data_waits(rank)
    traced = traced_calls(rank)
    return RankAnalysis(
        rank=rank.process.rank,
        highest_peak_bytes=_highest(step.peak_allocated_bytes for step in rank.steps),
        highest_reserved_bytes=_highest(step.peak_reserved_bytes for step in rank.steps),
        timeline=timeline,
        peak=peak,
        model_states=model_states(rank, run.plan),
        activations=activations(traced),
        checkpointing=checkpointing(traced, timeline, peak, time),
        step_time=time,
        utilization=used,
        communication=traffic,
        fragmentation=fragmentation(rank),
        out_of_memory=out_of_memory(rank),
        operators=operator_table(rank),
        roofline=roofline(rank, time, used, hardware),
        evaluation=evaluation(rank),
        script_changes=script_changes(
            traced,
            timeline,
            time=time,
            traffic=traffic,
            used=used,
            hardware=hardware,
            waits=waits,
            has_plan=run.plan is not None,
        ),
        data_waits=waits,
    )


def _micro_batches(step: Step | None) -> tuple[int | None, int | None]:
    """Samples of each, None where they are not known or not alike; and how many there are, None where none was seen."""
    if step is None:
        return None, None
    size, rest = divmod(step.num_samples or 0, max(1, step.num_micro_batches))
    return None if rest or not size else size, step.num_micro_batches or None


def _highest(sizes_bytes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes_bytes if size is not None), default=None)


def analysis_to_json(analysis: Analysis) -> dict[str, Any]:
    """The stable JSON of `memadvisor show --json`, defined key by key in docs/json.md."""
    run = analysis.run
    return {
        "format": 1,
        "run": run_to_json(run),
        "ranks": [
            _rank_to_json(rank, process) for rank, process in zip(analysis.ranks, run.ranks, strict=True)
        ],
        "missing_ranks": list(run.missing_ranks),
        "unfinished_ranks": [dataclasses.asdict(rank) for rank in analysis.unfinished_ranks],
        "prediction": None if analysis.comparison is None else comparison_to_json(analysis.comparison),
        "skew": None if analysis.skew is None else dataclasses.asdict(analysis.skew),
        "samples_per_s": analysis.samples_per_s,
        "tokens_per_s": analysis.tokens_per_s,
        "larger_steps": None if analysis.larger_steps is None else dataclasses.asdict(analysis.larger_steps),
        "problems": list(run.problems),
    }


def run_to_json(run: Run) -> dict[str, Any]:
    """`run` of the stable JSON."""
    return {
        "path": str(run.path),
        "script": run.manifest.script,
        "arguments": list(run.manifest.arguments),
        "world_size": run.manifest.world_size,
        "created_unix_s": run.manifest.created_unix_s,
        "memadvisor_version": run.manifest.memadvisor_version,
        "format": list(run.manifest.format),
        "finished": run.is_finished,
        "planned": run.plan is not None,
    }


def _rank_to_json(rank: RankAnalysis, recorded: RankRun) -> dict[str, Any]:
    time = rank.step_time
    return {
        "rank": rank.rank,
        "device": recorded.process.device,
        "device_name": recorded.process.device_name,
        "num_steps": len(recorded.steps),
        "exit_code": None if recorded.ending is None else recorded.ending.exit_code,
        "exception": None if recorded.ending is None else recorded.ending.exception,
        "notes": [{"level": note.level, "text": note.text} for note in recorded.notes],
        "peak": {
            **_peak_to_json(rank.peak),
            "highest_step_bytes": rank.highest_peak_bytes,
            "highest_reserved_bytes": rank.highest_reserved_bytes,
        },
        "model_states": _model_states_to_json(rank.model_states),
        "activations": _activations_to_json(rank.activations),
        "checkpointing": _checkpointing_to_json(rank.checkpointing),
        "step_time_s": None if time is None else time.median_s,
        "step_time_is_steady": None if time is None else time.unsteady is None,
        "num_steady_steps": 0 if time is None else time.num_steps,
        "num_listened_steps": 0 if time is None else time.num_listened_steps,
        "by_phase_s": None if time is None else time.by_phase_s,
        "units": [] if time is None else [dataclasses.asdict(unit) for unit in time.units],
        "evaluation": None if rank.evaluation is None else dataclasses.asdict(rank.evaluation),
        "data_wait_s": None if time is None else time.data_wait_s,
        "data_wait_fraction": None if time is None else time.data_wait_fraction,
        "data_waits": None if rank.data_waits is None else dataclasses.asdict(rank.data_waits),
        "samples_per_s": None if time is None else time.samples_per_s,
        "tokens_per_s": None if time is None else time.tokens_per_s,
        "utilization": dataclasses.asdict(rank.utilization),
        "operators": None if rank.operators is None else dataclasses.asdict(rank.operators),
        "roofline": None if rank.roofline is None else dataclasses.asdict(rank.roofline),
        "communication": _communication_to_json(rank.communication),
        "allocator": None if rank.fragmentation is None else _fragmentation_to_json(rank.fragmentation),
        "out_of_memory": [dataclasses.asdict(event) for event in rank.out_of_memory],
        "script_changes": [dataclasses.asdict(change) for change in rank.script_changes],
        "overhead": {
            "timed_step_fraction": None if time is None else time.recorder_fraction,
            "traced_step_s": None if time is None else time.traced_step_s,
        },
    }


def _peak_to_json(peak: PeakBreakdown | None) -> dict[str, Any]:
    """All stable keys, with null where nothing was recorded."""
    if peak is None:
        nothing = dict.fromkeys(("allocated_bytes", "reserved_bytes", "unexplained_bytes", "position"))
        return {**nothing, "by_category_bytes": dict.fromkeys(CATEGORIES)}
    return {
        "allocated_bytes": peak.allocated_bytes,
        "reserved_bytes": peak.reserved_bytes,
        "unexplained_bytes": peak.unexplained_bytes,
        "position": peak.position,
        "by_category_bytes": peak.by_category_bytes,
        "is_allocators": peak.is_allocators,
        "time_s": peak.time_s,
        "by_module": [dataclasses.asdict(row) for row in peak.by_module],
    }


def _model_states_to_json(states: ModelStates | None) -> dict[str, Any]:
    names = (
        "num_params",
        "num_trainable",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_state_bytes",
        "expected_bytes",
        "expected_parameter_bytes",
        "expected_gradient_bytes",
        "expected_optimizer_state_bytes",
        "padding_bytes",
        "parameter_bytes_outside",
    )
    if states is None:
        return {**dict.fromkeys(names), "zero_stages": None, "components": []}
    return {
        **{name: getattr(states, name) for name in names},
        "zero_stages": list(states.zero_stages),
        "components": [dataclasses.asdict(component) for component in states.components],
    }


def _activations_to_json(kept: Activations | None) -> dict[str, Any]:
    return {
        "saved_bytes": None if kept is None else kept.saved_bytes,
        "moved_bytes": None if kept is None else kept.moved_bytes,
        "units": [] if kept is None else [dataclasses.asdict(unit) for unit in kept.units],
    }


def _checkpointing_to_json(found: Checkpointing | None) -> dict[str, Any]:
    return {
        "kind": "predicted",
        "peak_bytes_now": None if found is None else found.peak_bytes,
        "modules": [] if found is None else [_checkpointed_to_json(row) for row in found.rows],
        "num_left_out": 0 if found is None else found.num_left_out,
    }


def _checkpointed_to_json(row: CheckpointedModule) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row),
        "modules": list(row.modules),
        "extra_s_per_freed_gib": row.extra_s_per_freed_gib,
    }


def _communication_to_json(traffic: Communication | None) -> dict[str, Any]:
    times = ("time_s", "exposed_s", "overlapped_s", "waiting_s", "transfer_s")
    names = (
        "bytes",
        *times,
        "exposed_fraction",
        "late_fraction",
        "update_fraction",
        "num_calls",
        "num_unfinished",
    )
    tables = ("operations", "groups", "units")
    if traffic is None:
        return {**dict.fromkeys(names), **{table: [] for table in tables}}
    return {
        **{name: getattr(traffic, name) for name in names},
        **{table: [dataclasses.asdict(row) for row in getattr(traffic, table)] for table in tables},
    }


def _fragmentation_to_json(found: Fragmentation) -> dict[str, Any]:
    measured = found.measured
    return {
        "settings": found.settings,
        "measured": None
        if measured is None
        else {**dataclasses.asdict(measured), "fragmentation_bytes": measured.fragmentation_bytes},
        "predicted_allocated_bytes": found.predicted_allocated_bytes,
        "predicted_reserved_bytes": found.predicted_reserved_bytes,
        "is_for_other_device": found.is_for_other_device,
        "error_fraction": found.error_fraction,
    }


def comparison_to_json(compared: Comparison) -> dict[str, Any]:
    """`prediction` of the stable JSON."""
    return {
        "peak_bytes": _compared_to_json(compared.peak_bytes),
        "reserved_bytes": _compared_to_json(compared.reserved_bytes),
        "step_time_s": _compared_to_json(compared.step_time_s),
        "by_category_bytes": {
            name: _compared_to_json(pair) for name, pair in compared.by_category_bytes.items()
        },
        "components_s": {name: _compared_to_json(pair) for name, pair in compared.components_s.items()},
        "rank_peak_bytes": {
            str(rank): _compared_to_json(pair) for rank, pair in compared.rank_peak_bytes.items()
        },
        "peak_position": dict(zip(("predicted", "measured"), compared.peak_position, strict=True)),
        "micro_batch_size": _compared_to_json(compared.micro_batch_size),
        "num_micro_batches": _compared_to_json(compared.num_micro_batches),
        "step_time_is_steady": None if compared.step_time_s.measured is None else compared.unsteady is None,
        "budget_bytes": compared.budget_bytes,
        "within_budget": compared.within_budget,
        "late_s": compared.late_s,
        "plain": None if compared.plain is None else dataclasses.asdict(compared.plain),
    }


def _compared_to_json(pair: Compared) -> dict[str, Any]:
    return {
        "predicted": pair.predicted,
        "measured": pair.measured,
        "error_fraction": pair.error_fraction,
    }
