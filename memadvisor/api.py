"""The Python interface: the same loop as the command line's, around code that you hold in your hands."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memadvisor import __version__
from memadvisor.api_arguments import autocast_of, chunked_loss_of, of_kind, path_of, whole, whole_or_none
from memadvisor.cli.measuring import measure_engines, why_not_shared_out
from memadvisor.compression import UNCOMPRESSED, Compression
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.load import load_hardware
from memadvisor.local_sgd import LocalSgd
from memadvisor.plan import Plan
from memadvisor.plan_file import load_plan
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.launch import launch_id, take_run_directory
from memadvisor.run.run import DEFAULT_TRACE_STEP, NOTEBOOK, PROMPT, Run
from memadvisor.run.store import load_run

if TYPE_CHECKING:
    from memadvisor.analyzers.analysis import Analysis
    from memadvisor.engines.applied import Applied
    from memadvisor.planning.advise import Advice


_recording: dict[Profile, int] = {}  # those that have begun and not ended, by the thread that began them


class Profile:
    """What `with memadvisor.profile() as prof:` gives: where the run is, and afterwards what it says."""

    def __init__(self, directory: Path, trace_step: int) -> None:
        self.directory = directory
        self._trace_step = trace_step
        self._is_used = False
        self._recorder: Any = None

    def __repr__(self) -> str:
        return f"<profile in {self.directory}>"

    def __enter__(self) -> Profile:
        if self._is_used:
            raise UsageError(
                f"The profile in {str(self.directory)!r} is used already, and a run is of one `with` block.",
                hint="call memadvisor.profile() again.",
            )
        _require_no_other_thread()
        self._is_used = True
        _recording[self] = threading.get_ident()
        try:
            self._recorder = self._begin()
        except BaseException:
            del _recording[self]
            raise
        return self

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """What `@memadvisor.profile()` would call."""
        raise UsageError(
            "A profile is of one `with` block, and is no decorator.",
            hint="write `with memadvisor.profile():` around the training loop, or inside the function.",
        )

    def _begin(self) -> Any:
        from memadvisor.capture.recorder import Recorder
        from memadvisor.capture.script import Target
        from memadvisor.capture.session import rank_identity, start_manifest
        from memadvisor.capture.writer import RecorderOptions

        identity = rank_identity()
        name, arguments = _program()
        target = Target(name=name, is_module=False, arguments=arguments)
        options = RecorderOptions(
            directory=self.directory,
            trace_step=self._trace_step,
            rank=identity.rank,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            rank_is_guess=identity.is_guess,
            measure_engines=measure_engines,
            why_not_shared_out=why_not_shared_out,
        )
        try:
            start_manifest(
                self.directory, target, identity.world_size, __version__, is_alone=launch_id() is None
            )
            return Recorder(options)
        except OSError as error:
            raise UsageError(
                f"{str(self.directory)!r} cannot be written: {error.strerror}.",
                hint="name another directory.",
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._recorder is None:
            raise UsageError(
                "This profile has not begun.", hint="use it as `with memadvisor.profile() as prof:`."
            )
        from memadvisor.capture.script import exit_code_of

        _recording.pop(self, None)
        failure = None if isinstance(error, GeneratorExit) else error  # a closed generator has not failed
        named = None if failure is None or isinstance(failure, SystemExit) else type(failure).__name__
        self._recorder.see_failure(failure)
        self._recorder.finish(exit_code_of(failure), named)

    @property
    def run(self) -> Run:
        """What has been recorded so far. Raises RunFormatError before the first step has ended."""
        return load_run(self.directory)

    @property
    def analysis(self) -> Analysis:
        from memadvisor.analyzers.analysis import analyze

        return analyze(self.run)


def _require_no_other_thread() -> None:
    """torch's hooks and profiler are the process's: two threads' recordings would each see, and disturb, the other's steps."""
    living = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    if living.intersection(_recording.values()):
        raise UsageError(
            "Another thread of this process is recording a profile.", hint="record one training at a time."
        )


def profile(out: str | Path | None = None, *, trace_step: int = DEFAULT_TRACE_STEP) -> Profile:
    """Record the training inside a `with` block into the directory `out` (default: memadvisor-runs/...).

    Model and optimizer are found by themselves. Step `trace_step` (counted from 0) is traced. Raises
    UsageError when the directory cannot be made or is not empty. Ranks of one launch share it.
    """
    from memadvisor.capture.session import rank_identity

    step = whole(trace_step, "trace_step", least=0)
    path = None if out is None else path_of(out, "out", "name the run directory to make.")
    label = Path(_program()[0].strip("()").replace(" ", "-")).stem
    return Profile(take_run_directory(path, label, rank=rank_identity().rank, argument="out"), step)


def _program() -> tuple[str, tuple[str, ...]]:
    """The script that runs and its arguments. A notebook's kernel is none, and what started it is nobody's concern."""
    name = sys.argv[0] if sys.argv else ""
    if name.endswith("kernel_launcher.py"):
        return NOTEBOOK, ()
    return name or PROMPT, tuple(sys.argv[1:])


_BUDGETS = 'give a text such as "24GiB" or "60%" of the run\'s own peak, or a whole number of bytes.'


def load(path: str | Path) -> Run:
    """Read a run directory. Raises RunFormatError when it is none."""
    return load_run(path_of(path, "path", "name the directory of a run."))


def advise(
    run: Run | str | Path,
    *,
    memory: int | str,
    gpus: int | None = None,
    hardware: Hardware | str | Path | None = None,
    precision: Precision = FULL_PRECISION,
    compression: Compression = UNCOMPRESSED,
    local_sgd: LocalSgd | None = None,
    optimizer_bits: int | None = None,
    fused_updates: bool = False,
    chunked_loss: int | str | None = None,
    autocast: str | None = None,
    policy: str | None = None,
    learn: Run | str | Path | list[Run | str | Path] | tuple[Run | str | Path, ...] = (),
    near_ranks: int | None = None,
    micro_batch: int | None = None,
) -> Advice:
    """Rank the plans for a memory budget a rank (`"24GiB"`, `"60%"` of the run's own peak, or bytes).

    `gpus`: ranks, by default those of the run. `hardware`: a device's name, or what `memadvisor calibrate` wrote. `learn`:
    runs of plans that correct predicted times. `chunked_loss`: "auto", or rows of a chunk. `autocast`: "bf16". `micro_batch`: samples of each, more than were recorded. The best plan is
    `.plans[0].plan`. Raises MemadvisorError.
    """
    from memadvisor.autocast_workspaces import workspaces_for
    from memadvisor.planning.advise import advise as plan_advice
    from memadvisor.planning.budget import budget_bytes

    recorded = _run_of(run, "run")
    runs = learn if isinstance(learn, list | tuple) else [learn]
    return plan_advice(
        recorded,
        memory_bytes=budget_bytes(memory, recorded)
        if isinstance(memory, str)
        else whole(memory, "memory", least=1, most=2**60, hint=_BUDGETS),
        num_ranks=whole_or_none(gpus, "gpus", least=1),
        hardware=_hardware_of(hardware),
        precision=of_kind(precision, Precision, "precision", "give a memadvisor.precision.Precision."),
        compression=of_kind(
            compression, Compression, "compression", "give a memadvisor.compression.Compression."
        ),
        local_sgd=None
        if local_sgd is None
        else of_kind(local_sgd, LocalSgd, "local_sgd", "give a memadvisor.local_sgd.LocalSgd."),
        optimizer_bits=whole_or_none(optimizer_bits, "optimizer_bits", least=1),
        fused_updates=of_kind(fused_updates, bool, "fused_updates", "give True or False."),
        chunked_loss=chunked_loss_of(chunked_loss),
        autocast=autocast_of(autocast),
        policy=policy,
        learn_from=[_run_of(each, "learn") for each in runs],
        near_ranks=whole_or_none(near_ranks, "near_ranks", least=2),
        micro_batch=whole_or_none(micro_batch, "micro_batch", least=1),
        workspaces_of=workspaces_for(recorded),
    )


def _run_of(value: Run | str | Path, name: str) -> Run:
    return (
        value
        if isinstance(value, Run)
        else load_run(path_of(value, name, "give a run, such as prof.run, or its directory."))
    )


def _hardware_of(value: Hardware | str | Path | None) -> Hardware | None:
    if value is None or isinstance(value, Hardware):
        return value
    hint = "give a device's name, or a file of `memadvisor calibrate`."
    return load_hardware(str(path_of(value, "hardware", hint)))


def apply(plan: Plan | str | Path, model: Any, optimizer: Any) -> Applied:
    """Apply a plan to a live model and optimizer; `.remove()`, on all ranks, takes it off again. Raises PlanError."""
    from memadvisor.capture.session import rank_identity
    from memadvisor.engines.apply import apply as apply_plan

    hint = "give a plan, such as advice.plans[0].plan, or a file of one."
    read = plan if isinstance(plan, Plan) else load_plan(path_of(plan, "plan", hint))
    return apply_plan(read.of_rank(rank_identity().rank) if read.ranks else read, model, optimizer)
