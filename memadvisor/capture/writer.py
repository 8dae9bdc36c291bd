"""What the recorder knows, as rows of its rank's journal."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from memadvisor.capture.allocator_snapshot import AllocatorSnapshot
from memadvisor.capture.autocast_rows import autocast_off_rows, idle_cast_rows
from memadvisor.capture.census import has_any_order, optimizer_state_rows, parameter_rows, stranger_note
from memadvisor.capture.clock import monotonic_less_wall_ns
from memadvisor.capture.closed_step import ClosedStep, SpanFields
from memadvisor.capture.models import Models
from memadvisor.capture.pipeline_stages import pipeline_stages
from memadvisor.capture.product_precision import float32_products
from memadvisor.capture.rows import collective_rows, module_call_rows, operator_read_rows, operator_rows
from memadvisor.capture.tracer import Trace
from memadvisor.capture.updates import existing_optimizers
from memadvisor.own_hooks import hooks_aside
from memadvisor.run.allocator_records import LiveStorage, OutOfMemory
from memadvisor.run.compiled import has_compiled
from memadvisor.run.cut import inside_wrapper, is_around_a_list, unwrap
from memadvisor.run.ddp_options import options_left_to_ddp
from memadvisor.run.documents import Ending, Note, ProcessInfo
from memadvisor.run.frames import MAX_JOURNAL_RAW_BYTES
from memadvisor.run.journal import JournalWriter
from memadvisor.run.living import living, one_look, outermost_modules
from memadvisor.run.loader_records import DataWait, LoaderInfo
from memadvisor.run.own_forwards import is_compiled_in_place, is_made_by_compiler
from memadvisor.run.process import own_mark
from memadvisor.run.records import Counter, Module, Parameter, Step, Unit
from memadvisor.run.run import DEFAULT_TRACE_STEP
from memadvisor.run.say import say
from memadvisor.run.store import journal_path
from memadvisor.run.transfer_records import Transfer
from memadvisor.units import format_bytes

_FLUSH_EVERY_S = 0.25
# Beyond so many, those that the script goes on to call are not written.
_MOST_MODELS = 64
# A row of a trace takes less than this in the file.
_BYTES_OF_A_ROW = 40
_APART = (
    "The {0} ranks train apart, each a model of its own: the script has not begun torch.distributed. `memadvisor run --zero 0 "
    "--nproc {0}` makes a script of one process data-parallel, if its batches come from a DataLoader."
)
# A reader takes only so much of a journal; the steps and the ending must still fit.
_MAX_RAW_BYTES = MAX_JOURNAL_RAW_BYTES * 3 // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOptions:
    """`trace_step` is the index of the traced step: after the warm-up by default.

    Once `max_bytes` are written, only the steps are. `measure_engines`, the engine's, is called once after the
    traced step, on a CPU: seconds, in the order of ProcessInfo's fields, into which they go. `why_not_shared_out`, the
    engine's too, is asked of each optimizer then. `sees_casts`: the script's own,
    which tell what autocast would make of its step. Where a plan is in force nobody asks, and a trace that they inflate would
    be made again of the next step, whose samples are not those that the plan was made from.
    """

    directory: Path
    rank: int
    world_size: int
    local_rank: int
    rank_is_guess: bool = False  # nobody has said which rank this is; the process group will
    trace_step: int = DEFAULT_TRACE_STEP
    memory_limit_bytes: int | None = None
    max_bytes: int = 10**9
    measure_engines: Callable[[], tuple[float, ...]] | None = None
    why_not_shared_out: Callable[[torch.optim.Optimizer], str | None] | None = None
    sees_casts: bool = True


_MEASURED = (
    "second_run_call_s",
    "second_run_tensor_s",
    "second_run_operator_s",
    "rounding_tensor_s",
    "rounding_element_s",
    "restoring_tensor_s",
    "restoring_element_s",
)
_NUM_OF_HOST = 3  # of these: what the host takes, whatever the device


class RankWriter:
    """Collects rows and writes them at least every 250 ms of training."""

    def __init__(self, options: RecorderOptions) -> None:
        self._options = options
        self._journal = JournalWriter(journal_path(options.directory, options.rank))
        self._start_s = time.monotonic()
        self._last_flush_s = self._start_s
        self._steps: list[ClosedStep] = []
        self._loaders: list[LoaderInfo] = []
        self._traced: tuple[int, Trace] | None = None  # whose operations the device may not have finished
        self._num_models = -1  # when they were written last
        self._has_trace = self._knows_traced_models = False
        self._written: set[tuple[str, str]] = set()  # rows of models: table, name
        self._counters: list[Counter] = []
        self._has_room = True
        self._engines_s: tuple[float, ...] | None = None
        self._whole_optimizer: str | None = None
        self.has_local_updates: bool | None = None

    @property
    def rank(self) -> int:
        return self._options.rank

    @property
    def failure(self) -> OSError | None:
        return self._journal.failure

    def add_step(self, step: ClosedStep, loaders: Sequence[LoaderInfo]) -> None:
        """`loaders`: that have been read for the first time."""
        self._steps.append(step)
        self._loaders += loaders

    def add_counter(self, sample: Counter) -> None:
        self._counters.append(sample)

    def write_process(self, device: torch.device) -> None:
        """Who writes; again when the model's device is known: the last one counts."""
        self._journal.write_document("process", dataclasses.asdict(self._process_info(device)))

    def measure_engines(self, device: torch.device) -> None:
        """What the engine's recomputation takes of the host beside a forward, and on a CPU its rounding; a run without it
        predicts without it."""
        if self._options.measure_engines is None:
            return
        # A mode may be in force, and hooks. The script's would be asked what our own trainings do and keep; the watch of
        # --memory-limit took our tensors for the script's, and said that a training that fits had run out of memory.
        with contextlib.suppress(Exception), hooks_aside(lambda pack: True), _disable_current_modes():
            measured = self._options.measure_engines()
            self._engines_s = measured if device.type == "cpu" else measured[:_NUM_OF_HOST]
            self.write_process(device)

    def try_optimizers(self, device: torch.device, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Whether ranks could share out what they update."""
        ask = self._options.why_not_shared_out
        if ask is None:
            return
        with contextlib.suppress(Exception), hooks_aside(lambda pack: True), _disable_current_modes():
            self._whole_optimizer = next(filter(None, map(ask, optimizers)), None)
        if self._whole_optimizer is not None:
            self.write_process(device)

    def write_note(self, level: str, text: str) -> None:
        self._journal.write_document(
            "note", dataclasses.asdict(Note(level=level, text=text, time_s=time.monotonic()))
        )

    def write_out_of_memory(self, event: OutOfMemory, alive: list[LiveStorage]) -> None:
        self._journal.write_rows("live_storages", alive)
        self._journal.write_rows("out_of_memory", [event])

    def write_models(self, models: Models, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]) -> None:
        """When the first step has run every unit that it runs, and what is new where a later one calls further models, up to
        the traced one: of models behind it no storage is known."""
        is_first, is_new = self._num_models < 0, models.num_prefixes != self._num_models
        is_over, self._knows_traced_models = self._knows_traced_models, self._has_trace
        if not is_first and (is_over or not is_new or self._num_models > _MOST_MODELS):
            return
        self._num_models = models.num_prefixes
        # Some may step later, as the generator's does where the discriminator's steps end a step.
        with_later = [*optimizers(), *existing_optimizers()]
        updated = {id(p) for optimizer in with_later for p in _updated_by(optimizer)}
        self._write_new("modules", models.module_rows())
        self._write_new("units", models.unit_rows(updated))
        rows = parameter_rows(models, updated, with_later)
        self._write_new("parameters", rows)
        if not is_first:
            return
        if (note := stranger_note(rows, optimizers())) is not None:
            self.write_note("warning", note)
        self._journal.write_rows("shard_groups", models.shard_group_rows())
        self._journal.write_rows("pipeline_stages", pipeline_stages(models.roots()))
        self._journal.write_rows("tensor_parallel", models.tensor_parallel_rows())

    def _write_new(self, table: str, rows: Sequence[Module] | Sequence[Unit] | Sequence[Parameter]) -> None:
        """Rows of names that have none yet."""
        new = [row for row in rows if (table, row.name) not in self._written]
        self._written.update((table, row.name) for row in new)
        self._journal.write_rows(table, new)

    def write_trace(
        self, step: int, trace: Trace, models: Models, optimizers: Iterable[torch.optim.Optimizer]
    ) -> bool:
        """False, and a note: the trace does not fit into what may be written."""
        account, journal = trace.account, self._journal
        num_rows = len(account.storages) + len(account.residuals) + len(account.saved)
        num_rows += sum(1 + len(call.inputs) for call in trace.calls)
        if self._journal.num_bytes + _BYTES_OF_A_ROW * num_rows > self._options.max_bytes:
            limit = format_bytes(self._options.max_bytes)
            self.write_note(
                "warning", f"The traced step does not fit into --max-run-size {limit}; it is left out."
            )
            return False
        journal.write_rows("storages", account.storages)
        journal.write_rows("residuals", account.residuals)
        journal.write_rows("saved", account.saved)
        journal.write_rows("operators", operator_rows(trace))
        journal.write_rows("operator_reads", operator_read_rows(trace))
        journal.write_rows("idle_casts", idle_cast_rows(trace))
        journal.write_rows("autocast_off", autocast_off_rows(trace))
        self._traced, self._has_trace = (step, trace), True
        self._write_collectives()
        calls, tensors = module_call_rows(trace)
        journal.write_rows("module_calls", calls)
        journal.write_rows("call_tensors", tensors)
        journal.write_rows("optimizer_states", optimizer_state_rows(models, optimizers))
        if trace.uncounted:
            names = ", ".join(trace.uncounted)
            self.write_note("warning", f"FLOPs of {names} could not be worked out; they count 0.")
        num_ranks = self._options.world_size
        if num_ranks > 1 and not _has_process_group():
            self.write_note("warning", _APART.format(num_ranks))
        return True

    def write_transfers(self, step: int, moved: Iterable[Any]) -> None:
        self._journal.write_rows("transfers", [Transfer(step, *each) for each in moved])

    def _write_collectives(self, *, is_last: bool = False) -> None:
        """Once the device has passed their marks; at the end, with what there is."""
        if self._traced is None:
            return
        step, trace = self._traced
        if is_last or all(call.is_over for call in trace.collectives):
            self._journal.write_rows("collectives", collective_rows(trace, step))
            self._traced = None

    def write_allocator(self, snapshot: AllocatorSnapshot) -> None:
        self._journal.write_rows("segments", snapshot.segments)
        self._journal.write_rows("allocator_states", [snapshot.state])

    def flush(self, now_s: float, *, force: bool = False) -> None:
        """Write the steps whose marks the device has passed, in order."""
        if not force and now_s - self._last_flush_s < _FLUSH_EVERY_S:
            return
        self._last_flush_s = now_s
        self._write_collectives()
        steps: list[Step] = []
        spans: list[SpanFields] = []
        waits: list[DataWait] = []
        while self._steps and (rows := self._steps[0].rows()) is not None:
            steps.append(rows[0])
            spans += rows[1]
            waits += rows[2]
            self._steps.pop(0)
        self._journal.write_rows("steps", steps)
        if self._has_room and not self._fits():
            self._has_room = False
            limit = format_bytes(self._options.max_bytes)
            after = f"after step {steps[-1].index}" if steps else "from here on"
            self.write_note(
                "warning", f"This rank has written as much as it may (--max-run-size {limit}): {after} only steps are "
                "recorded, without phases, units and counters.",
            )  # fmt: skip
        if self._has_room:
            self._journal.write_tuples("spans", spans)
            self._journal.write_rows("data_loaders", self._loaders)
            self._journal.write_rows("data_waits", waits)
            self._journal.write_rows("counters", self._counters)
        self._counters.clear()
        self._loaders.clear()

    def _fits(self) -> bool:
        journal = self._journal
        return journal.num_bytes < self._options.max_bytes and journal.num_raw_bytes < _MAX_RAW_BYTES

    def write_ending(self, exit_code: int, exception: str | None, device: torch.device) -> None:
        if device.type == "cuda" and self._steps:
            torch.cuda.synchronize(device)  # the training is over; its last steps still need their times
        self.flush(time.monotonic(), force=True)
        self._write_collectives(is_last=True)
        ending = Ending(exit_code=exit_code, exception=exception, time_s=time.monotonic())
        self._journal.write_document("ending", dataclasses.asdict(ending))

    def discard(self) -> None:
        """Close, and leave no file behind."""
        self._journal.close()
        self._journal.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._journal.close()

    def _process_info(self, device: torch.device) -> ProcessInfo:
        properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        with one_look():
            wrapped = None if process_group_size() == 1 else living(DistributedDataParallel)
            models = outermost_modules(torch.nn.Module) if has_compiled() else []
            has_zero = None if wrapped is None else has_zero_optimizer()
        precision = float32_products(device)
        return ProcessInfo(
            rank=_process_group_rank(self._options),
            world_size=max(self._options.world_size, process_group_size()),
            local_rank=self._options.local_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(device),
            device_name=properties.name if properties else platform.processor() or platform.machine(),
            device_memory_bytes=properties.total_memory if properties else _host_memory_bytes(),
            num_threads=torch.get_num_threads(),
            unix_offset_s=-monotonic_less_wall_ns() / 1e9,
            start_s=self._start_s,
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            mark=own_mark(),
            has_ddp=None if wrapped is None else bool(wrapped),
            ddp_ranks=min((ddp.process_group.size() for ddp in wrapped or ()), default=None),
            has_ddp_hook=None if wrapped is None else any(getattr(ddp, "_comm_hooks", ()) for ddp in wrapped),
            has_ddp_join=None if wrapped is None else any(map(joins_ranks, wrapped)),
            has_zero_optimizer=has_zero,
            has_replicate=None if wrapped is None else any(map(is_around_a_list, wrapped)),
            has_ddp_any_order=None if wrapped is None else any(map(has_any_order, wrapped)),
            ddp_option=next(filter(None, map(options_left_to_ddp, wrapped or ())), None),
            has_local_updates=self.has_local_updates,
            whole_optimizer=self._whole_optimizer,
            has_compiled_model=any(map(is_compiled, models)),
            has_model_compiled_in_place=any(is_compiled_in_place(unwrap(model)) for model in models),
            float32_matmul=precision["matmul"],
            float32_convolution=precision["convolution"],
            **dict(zip(_MEASURED, self._engines_s or (), strict=False)),
        )


def joins_ranks(ddp: Any) -> bool:
    """Whether ranks may run out of data before others: torch's Join shadows their collectives."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def has_zero_optimizer() -> bool:
    """torch's own is looked for where the script has imported it: that takes a second."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and bool(living(module.ZeroRedundancyOptimizer))


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile has made it of a model."""
    inner: Any = model
    while inner is not None:
        if is_made_by_compiler(inner):
            return True
        inner = inside_wrapper(inner)
    return False


def _has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def process_group_size() -> int:
    """Ranks of the script's process group; 1 where it has none."""
    return dist.get_world_size() if _has_process_group() else 1


def _process_group_rank(options: RecorderOptions) -> int:
    """What the process group says where no launcher has; a script's own group may count otherwise."""
    is_known = _has_process_group()
    return dist.get_rank() if options.rank_is_guess and is_known else options.rank


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def say_stopped(error: BaseException) -> str:
    """Tell the user, in one line, that recording has ended before the script; the line."""
    text = " ".join(f"memadvisor stopped recording: {type(error).__name__}: {error}".split())[:300]
    say(text)
    return text


def _updated_by(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """What it has state for; all that it has where they are frozen to the last, while another optimizer's turn lasts."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(parameter.requires_grad for parameter in parameters):
        return parameters
    return [parameter for parameter, state in optimizer.state.items() if state]
