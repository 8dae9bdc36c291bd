"""The Python interface: the same loop as the command line's, around code that you hold in your hands."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memadvisor import __version__
from memadvisor.cli.measuring import measure_engines
from memadvisor.compression import UNCOMPRESSED, Compression
from memadvisor.local_sgd import LocalSgd
from memadvisor.plan import Plan
from memadvisor.plan_file import load_plan
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.launch import take_run_directory
from memadvisor.run.run import DEFAULT_TRACE_STEP, NOTEBOOK, PROMPT, Run
from memadvisor.run.store import load_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memadvisor.analyzers.analysis import Analysis
    from memadvisor.engines.apply import Applied
    from memadvisor.hardware.hardware import Hardware
    from memadvisor.planning.advise import Advice


class Profile:
    """What `with memadvisor.profile() as prof:` gives: where the run is, and afterwards what it says."""

    def __init__(self, directory: Path, trace_step: int) -> None:
        self.directory = directory
        self._trace_step = trace_step
        self._recorder: Any = None

    def __repr__(self) -> str:
        return f"<profile in {self.directory}>"

    def __enter__(self) -> Profile:
        from memadvisor.capture.recorder import Recorder
        from memadvisor.capture.script import Target
        from memadvisor.capture.session import rank_identity, start_manifest
        from memadvisor.capture.writer import RecorderOptions

        identity = rank_identity()
        name, arguments = _program()
        target = Target(name=name, is_module=False, arguments=arguments)
        start_manifest(self.directory, target, identity.world_size, __version__)
        options = RecorderOptions(
            directory=self.directory,
            trace_step=self._trace_step,
            rank=identity.rank,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            rank_is_guess=identity.is_guess,
            measure_engines=measure_engines,
        )
        self._recorder = Recorder(options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.finish(0 if error is None else 1, kind.__name__ if kind is not None else None)

    @property
    def run(self) -> Run:
        """What has been recorded so far. Raises RunFormatError before the first step has ended."""
        return load_run(self.directory)

    @property
    def analysis(self) -> Analysis:
        from memadvisor.analyzers.analysis import analyze

        return analyze(self.run)


def profile(out: str | Path | None = None, *, trace_step: int = DEFAULT_TRACE_STEP) -> Profile:
    """Record the training inside a `with` block into the directory `out` (default: memadvisor-runs/...).

    Model and optimizer are found by themselves. Step `trace_step` (counted from 0) is traced. Raises
    UsageError when the directory cannot be made or is not empty. Ranks of one launch share it.
    """
    from memadvisor.capture.session import rank_identity

    label = Path(_program()[0].strip("()").replace(" ", "-")).stem
    return Profile(take_run_directory(out, label, rank=rank_identity().rank), trace_step)


def _program() -> tuple[str, tuple[str, ...]]:
    """The script that runs and its arguments. A notebook's kernel is none, and what started it is nobody's concern."""
    name = sys.argv[0] if sys.argv else ""
    if name.endswith("kernel_launcher.py"):
        return NOTEBOOK, ()
    return name or PROMPT, tuple(sys.argv[1:])


def load(path: str | Path) -> Run:
    """Read a run directory. Raises RunFormatError when it is none."""
    return load_run(path)


def advise(
    run: Run | str | Path,
    *,
    memory: int | str,
    gpus: int | None = None,
    hardware: Hardware | None = None,
    precision: Precision = FULL_PRECISION,
    compression: Compression = UNCOMPRESSED,
    local_sgd: LocalSgd | None = None,
    optimizer_bits: int | None = None,
    policy: str | None = None,
    learn: Sequence[Run | str | Path] = (),
    near_ranks: int | None = None,
    micro_batch: int | None = None,
) -> Advice:
    """Rank the plans for a memory budget a rank (`"24GiB"`, `"60%"` of the run's own peak, or bytes). `learn`: runs of plans that correct predicted times. `micro_batch`: samples of each, more than were recorded.
    Raises MemadvisorError."""
    from memadvisor.planning.advise import advise as plan_advice
    from memadvisor.planning.budget import budget_bytes

    recorded = run if isinstance(run, Run) else load_run(run)
    return plan_advice(
        recorded,
        memory_bytes=budget_bytes(memory, recorded) if isinstance(memory, str) else memory,
        num_ranks=gpus,
        hardware=hardware,
        precision=precision,
        compression=compression,
        local_sgd=local_sgd,
        optimizer_bits=optimizer_bits,
        policy=policy,
        learn_from=[each if isinstance(each, Run) else load_run(each) for each in learn],
        near_ranks=near_ranks,
        micro_batch=micro_batch,
    )


def apply(plan: Plan | str | Path, model: Any, optimizer: Any) -> Applied:
    """Apply a plan to a live model and optimizer; `.remove()` takes it off again. Raises PlanError."""
    from memadvisor.capture.session import rank_identity
    from memadvisor.engines.apply import apply as apply_plan

    read = plan if isinstance(plan, Plan) else load_plan(plan)
    return apply_plan(read.of_rank(rank_identity().rank) if read.ranks else read, model, optimizer)
