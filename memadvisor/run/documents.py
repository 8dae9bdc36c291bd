"""What one profiled process says of itself: each class is one document of the journal, of which the last counts, but for
notes. Times are as in records.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Who wrote a journal. `mark` tells the process from all others of its number: the machine's boot, the namespace of
    processes, and when it started; None where the system does not say. What recomputing takes beside the forward
    itself, for a call, for each tensor that it saves, and for each operator in either run of a unit that keeps outputs, is
    measured after the traced step; so is what rounding an activation takes, and bringing it back: by tensor, and by element.
    None on GPUs. `has_ddp`: whether a DistributedDataParallel was there, and `has_ddp_hook`, whether one with a
    communication hook of the script's (`register_comm_hook`); `has_ddp_join`: whether one was in torch's `Join`, for ranks
    with fewer batches than others; `ddp_ranks`: how many ranks its process group has, of several the smallest;
    `has_zero_optimizer`: whether there was a ZeroRedundancyOptimizer; `has_replicate`: whether one was around a list of
    parameters, as torch's composable `replicate` makes it; `has_ddp_any_order`: whether one lets gradients come in any order
    (`find_unused_parameters`, `static_graph`); `ddp_option`: what one is told that no engine does in its place, in words
    (ddp_options.py); `has_local_updates`: whether one was called last inside `no_sync`, or without gradients, when an optimizer
    of the traced step updated what it holds. None where the script has one rank. `whole_optimizer`: why ZeRO stages 1 to 3 cannot share out one of the
    script's optimizers, as `run` would say; None where they can, and where it was not tried.
    `has_compiled_model`: whether what the script calls is what torch.compile has made of a whole model, and
    `has_model_compiled_in_place`: whether it is a model compiled by `model.compile()`; None in older runs.
    `float32_matmul`, `float32_convolution`: in what the device computes products of float32 tensors when the first step had
    ended, ieee or tf32; None on CPUs."""

    rank: int
    world_size: int
    local_rank: int
    pid: int
    host: str
    device: str  # "cpu" or "cuda:0": whose allocator the peaks are of
    device_name: str  # "NVIDIA H200", or the processor's name
    device_memory_bytes: int | None
    num_threads: int | None
    unix_offset_s: float  # wall clock = monotonic + this
    start_s: float
    torch_version: str
    python_version: str
    mark: str | None = None
    second_run_call_s: float | None = None
    second_run_tensor_s: float | None = None
    second_run_operator_s: float | None = None
    rounding_tensor_s: float | None = None
    rounding_element_s: float | None = None
    restoring_tensor_s: float | None = None
    restoring_element_s: float | None = None
    has_ddp: bool | None = None
    has_ddp_hook: bool | None = None
    has_ddp_join: bool | None = None
    ddp_ranks: int | None = None
    has_zero_optimizer: bool | None = None
    has_replicate: bool | None = None
    has_ddp_any_order: bool | None = None
    ddp_option: str | None = None
    has_local_updates: bool | None = None
    whole_optimizer: str | None = None
    has_compiled_model: bool | None = None
    has_model_compiled_in_place: bool | None = None
    float32_matmul: str | None = None
    float32_convolution: str | None = None


# How a note begins on a communication hook that the traced step is before.
LATER_HOOK = "The communication hook of DistributedDataParallel ("


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that the reader should know: level is info, warning or error."""

    level: str
    text: str
    time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the script ended. A run without one was killed, or is still going."""

    exit_code: int
    exception: str | None  # type name alone; the message is the script's own affair
    time_s: float
