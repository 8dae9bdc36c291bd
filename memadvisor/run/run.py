"""A run: everything that one profiled training left behind, of all its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memadvisor.plan import Plan
from memadvisor.run.allocator_records import AllocatorState, DeviceSegment, LiveStorage, OutOfMemory
from memadvisor.run.autocast_records import AutocastOff, IdleCast
from memadvisor.run.documents import Ending, Note, ProcessInfo
from memadvisor.run.loader_records import DataWait, LoaderInfo
from memadvisor.run.parallel_records import PipelineStage, ShardGroup, TensorParallel
from memadvisor.run.records import (
    CallTensor,
    Collective,
    Counter,
    Module,
    ModuleCall,
    Operator,
    OperatorRead,
    OptimizerState,
    Parameter,
    Residual,
    Saved,
    Span,
    Step,
    Storage,
    Unit,
)
from memadvisor.run.transfer_records import Transfer
from memadvisor.units import format_bytes

UNKNOWN = "unknown"
NOTEBOOK, PROMPT = "(notebook)", "(Python prompt)"  # where code is typed: no script to start again
NUM_WARM_UP_STEPS = 2
DEFAULT_TRACE_STEP = NUM_WARM_UP_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What all ranks of a run share. `world_size` counts those too that the script started itself, where they recorded
    it; `arguments` are the script's, as given. Of a run that lost it, `script` and `memadvisor_version` are UNKNOWN;
    of code without one `script` is NOTEBOOK or PROMPT."""

    format: tuple[int, int]
    memadvisor_version: str
    created_unix_s: float
    world_size: int
    script: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RankRun:
    """The journal of one rank; tables that were not recorded are empty.

    `is_alive`, of a rank without an ending: whether its process was there when the run was read; None: not known.
    """

    process: ProcessInfo
    modules: tuple[Module, ...]
    units: tuple[Unit, ...]
    parameters: tuple[Parameter, ...]
    optimizer_states: tuple[OptimizerState, ...]
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    storages: tuple[Storage, ...]
    residuals: tuple[Residual, ...]
    saved: tuple[Saved, ...]
    operators: tuple[Operator, ...]
    collectives: tuple[Collective, ...]
    counters: tuple[Counter, ...]
    notes: tuple[Note, ...]
    ending: Ending | None
    module_calls: tuple[ModuleCall, ...] = ()
    call_tensors: tuple[CallTensor, ...] = ()
    operator_reads: tuple[OperatorRead, ...] = ()
    idle_casts: tuple[IdleCast, ...] = ()
    autocast_off: tuple[AutocastOff, ...] = ()
    segments: tuple[DeviceSegment, ...] = ()
    allocator_states: tuple[AllocatorState, ...] = ()
    out_of_memory: tuple[OutOfMemory, ...] = ()
    live_storages: tuple[LiveStorage, ...] = ()
    shard_groups: tuple[ShardGroup, ...] = ()
    pipeline_stages: tuple[PipelineStage, ...] = ()
    tensor_parallel: tuple[TensorParallel, ...] = ()
    data_loaders: tuple[LoaderInfo, ...] = ()
    data_waits: tuple[DataWait, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    is_alive: bool | None = None

    def __repr__(self) -> str:
        """In a line: its rows are many thousands, and a prompt or a notebook shows what it is given."""
        return f"<rank {self.process.rank} on {self.process.device}: {_steps_text(self)}>"

    @property
    def has_stopped(self) -> bool:
        """The recorder gave up before the script ended, and noted it: how the script went on is not known."""
        return self.ending is None and any(note.level == "error" for note in self.notes)

    @property
    def traced_step(self) -> Step | None:
        """The last step that was traced; storages, saved tensors and operators are of this one."""
        return next((step for step in reversed(self.steps) if step.traced), None)

    @property
    def has_lost_trace(self) -> bool:
        """A step was traced, and nothing that it held is in what can be read: the run is damaged, or still being written."""
        return self.traced_step is not None and not self.storages

    @property
    def why_untraced(self) -> str:
        """In a few words, where nothing is known of a traced step."""
        return "the traced step's record is lost" if self.has_lost_trace else "no traced step was finished"

    @property
    def trace_option(self) -> str | None:
        """The option that has one of its steps traced, of a rank that ended with too few to reach the chosen one; its last
        is best, where optimizers have their state. None where one was traced, or more is known of why none was."""
        if not self.steps or self.ending is None or self.traced_step is not None or self.out_of_memory:
            return None
        if any("traced" in note.text for note in self.notes if note.level != "info"):
            return None
        return f"--trace-step {min(len(self.steps) - 1, DEFAULT_TRACE_STEP)}"

    def steady_steps(self) -> tuple[Step, ...]:
        """Timed steps that are neither warm-up nor next to a traced one; what throughput is made of.

        Where there are any after a traced step, they alone: until then a CPU's allocator keeps its account and is
        slower for it. Where what the recorder took is known of some, those alone: a step whose trace was left out has
        none, and took longer than the script's own. A run too short to have any has its last timed step instead
        (`unsteady_step`).
        """
        timed = [step for step in self.steps if not step.traced]
        return self._steady_steps() or tuple(timed[-1:])

    @property
    def unsteady_step(self) -> Step | None:
        """What stands in for the steady steps of a run that has none: its last timed step."""
        return None if self._steady_steps() else next(iter(self.steady_steps()), None)

    def _steady_steps(self) -> tuple[Step, ...]:
        traced = {step.index for step in self.steps if step.traced}
        timed = [step for step in self.steps if not step.traced]
        steady = [step for step in timed if step.index >= NUM_WARM_UP_STEPS and step.index - 1 not in traced]
        after = [step for step in steady if step.index > max(traced, default=-1)]
        undisturbed = [step for step in after or steady if step.recorder_s is not None]
        return tuple(undisturbed or after or steady)

    def steps_with_units(self) -> tuple[Step, ...]:
        """The steady steps whose modules were listened to; what times of phases and units are made of.

        A model of many tiny layers is listened to only now and then. All steady steps, where no unit was ever seen.
        """
        steady = self.steady_steps()
        seen = {span.step for span in self.spans if span.kind.startswith("unit_")}
        return tuple(step for step in steady if step.index in seen) or steady


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run:
    """`missing_ranks` wrote nothing readable; `problems` say in words what is damaged or absent."""

    path: Path
    manifest: Manifest
    ranks: tuple[RankRun, ...]
    missing_ranks: tuple[int, ...]
    problems: tuple[str, ...]
    plan: Plan | None  # the plan that was applied, where one was

    def __repr__(self) -> str:
        """In a line, as that of its ranks is."""
        missing = f", {len(self.missing_ranks)} missing" if self.missing_ranks else ""
        many = f"{len(self.ranks)} rank{'' if len(self.ranks) == 1 else 's'}{missing}"
        steps = f", {_steps_text(self.ranks[0])}" if self.ranks else ""
        return f"<run {self.path}: {self.manifest.script}, {many}{steps}>"

    def rank(self, number: int) -> RankRun:
        """What one rank has recorded. Raises KeyError for one that is missing."""
        for rank in self.ranks:
            if rank.process.rank == number:
                return rank
        raise KeyError(f"rank {number} is not in the run")

    @property
    def traced_step(self) -> Step | None:
        """That of the first rank that has one."""
        return next((rank.traced_step for rank in self.ranks if rank.traced_step is not None), None)

    @property
    def is_finished(self) -> bool:
        return not self.missing_ranks and all(rank.ending is not None for rank in self.ranks)


def _steps_text(rank: RankRun) -> str:
    traced = rank.traced_step
    many = f"{len(rank.steps)} step{'' if len(rank.steps) == 1 else 's'}"
    if traced is None:
        return f"{many}, none traced"
    peak_bytes = traced.peak_allocated_bytes
    peak = "" if peak_bytes is None else f", peak {format_bytes(peak_bytes)}"
    return f"{many}, step {traced.index} traced{peak}"
