"""What one profiled process leaves behind, as rows; each class is one table of the journal.

Times are seconds of the process's monotonic clock (`time.monotonic`), which all processes of one machine share;
`ProcessInfo.unix_offset_s` (documents.py) turns them into wall-clock time. `None` always means "not recorded", never
zero. Names are those of `named_modules`; the model itself is "", a second one of the script `model1`, its children
`model1.layer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.run.allocator_records import AllocatorState, DeviceSegment, LiveStorage, OutOfMemory
from memadvisor.run.autocast_records import AutocastOff, IdleCast
from memadvisor.run.loader_records import DataWait, LoaderInfo
from memadvisor.run.parallel_records import PipelineStage, ShardGroup, TensorParallel
from memadvisor.run.transfer_records import Transfer

# Every live byte belongs to one of these. `unexplained` is what the allocator reports and no label explains.
CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "temporary",
    "communication",
    "weight_copy",
    "other",
)
UNEXPLAINED = "unexplained"
CUBLAS = "cuBLAS workspace"  # the operator of one
CUBLAS_LT = "cuBLASLt workspace"

# `outside` is everything that is in no model's forward, no backward and no optimizer step.
PHASES = ("baseline", "outside", "forward", "recompute", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Module:
    """A module of a discovered model; `unit` is the unit that its parameters belong to. `is_own_forward`: its forward is none
    of its class, but replaced by the script, or compiled, and an engine does nothing around it."""

    name: str
    type_name: str
    unit: str
    is_own_forward: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A subtree of modules, the grain of every decision; in order of first execution.

    Counts and bytes are of the full, unsharded model. A tied parameter counts in the first unit alone.
    `is_block`: made of further modules, unlike a single layer such as an embedding. `is_shared`: modules of
    other units hold some of its parameters too (tied weights). `shard_group`: the `ShardGroup` that all of its
    parameters are in; None where there is none. `model`: the name of the model that it is of; None in older runs.
    """

    name: str
    type_name: str
    is_block: bool
    num_parameters: int
    parameter_bytes: int
    trainable_bytes: int
    is_shared: bool = False
    shard_group: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """`size_bytes` is what the parameter's own elements take; `tied_to` names the first of tied ones.

    When the first step had ended: `in_optimizer`, whether an optimizer had it in its groups, and `has_gradient`. None
    in older runs, and of tied ones but the first.
    """

    name: str
    unit: str
    shape: str
    dtype: str
    num_elements: int
    size_bytes: int
    requires_grad: bool
    tied_to: str
    in_optimizer: bool | None = None
    has_gradient: bool | None = None


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One tensor of an optimizer's state at the traced step; `component` is its key (`exp_avg`).

    `optimizer`: its class (`torch.optim.adamw.AdamW`); None in older runs.
    """

    parameter: str
    component: str
    dtype: str
    num_elements: int
    size_bytes: int
    optimizer: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """From the end of one optimizer step to the end of the next.

    `recorder_s` is the time that memadvisor's own hooks took inside the step; None where it is not known: in a traced
    step, whether or not its trace was kept, and up to it on CPU, where the allocator keeps its account and is slower for
    it. A traced step's times never enter a throughput figure. Peaks are the allocator's own; on CPU only a traced step
    has one, and no step after it has `allocated_bytes`. Micro-batches are the calls of a model with gradients, or the
    backwards where these are fewer; of several models, or parts that the script calls itself, calls, samples and tokens
    are those of the one that has the most. A batch that a model is given again in the step counts once; in how many calls
    of all models a batch came again after a backward (SAM's second pass, a closure of L-BFGS, also one that makes its tensors anew) is `num_repeated_batches`,
    0 in older runs. `largest_input_elements`: elements of all tensors that the largest call of a model was given, where
    gradients were wanted; None in older runs. Where modules are not listened to, those of the first call in the step and
    after each backward. Where listening to the modules would cost too much, most steps go without: they have no spans but
    those of backward and optimizer, and no samples and tokens; an evaluation pass in one of them is not recorded as such,
    and its time is part of the step's (analyzers/evaluation.py counts them). A step whose end was known only later
    (capture/steps.py), and the one after it, have no `recorder_s`, and the former no bytes. `device_lag_s`: how far the
    device was behind the host when the optimizer began; None on CPUs, and in older runs.
    `gradient_bytes`: of the parameters that had gradients as an optimizer stepped, of the one that had most; None where
    modules were not listened to, where no optimizer stepped or none had any, and in older runs.
    """

    index: int
    start_s: float
    end_s: float
    traced: bool
    num_micro_batches: int
    num_samples: int | None
    num_tokens: int | None
    allocated_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    recorder_s: float | None
    num_repeated_batches: int = 0
    largest_input_elements: int | None = None
    device_lag_s: float | None = None
    gradient_bytes: int | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a step: kind is forward, evaluation, backward, optimizer, unit_forward or unit_backward.

    A `unit_forward` inside a backward is a recomputation and has kind `unit_recompute`; a forward without gradients is
    an `evaluation`. Both are of a model, or of a part that the script calls itself. `has_gradients`: whether a
    parameter of that model, or of any in a backward, has a gradient when it begins; None where nobody looked.
    """

    step: int
    kind: str
    unit: str
    micro_batch: int
    start_s: float
    end_s: float
    has_gradients: bool | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation of the traced step, or one that was alive when it began (phase `baseline`).

    `death_s` None: still alive at the end of the step. `module` is the innermost module that was running at birth; of
    what was there before the step its unit, or in brackets the class of a module of no training that holds it. For a
    temporary inside an operator, `operator` names that operator; for what no tensor names and was there before the step,
    what it is for (cuBLAS's workspaces). `last_held_s`: when somebody beside autograd was last seen to hold what it
    keeps, where modules and backwards begin and end; None: never, or older runs.
    `accumulated_s`: when autograd came to add it to a parameter's gradient, or to make it that; None likewise.
    """

    storage_id: int
    birth_s: float
    death_s: float | None
    size_bytes: int
    category: str
    dtype: str
    shape: str
    module: str
    unit: str
    phase: str
    micro_batch: int
    operator: str
    device: str
    last_use_s: float | None
    last_forward_use_s: float | None
    address: int | None = None  # on the device; not recorded on CPU
    last_held_s: float | None = None
    accumulated_s: float | None = None

    @property
    def place(self) -> str:
        """The module; of parameters that were gathered for another unit than the one that ran, their unit."""
        is_ahead = self.category == "parameter" and not f"{self.module}.".startswith(f"{self.unit}.")
        return self.unit if self.unit and is_ahead else self.module

    @property
    def owner(self) -> str:
        """The place; of what has none, what it was there for before the step, if that is known."""
        return self.place or (self.operator if self.phase == "baseline" else "")


@dataclass(frozen=True, slots=True)
class Residual:
    """From `time_s` on, the allocator reports this many bytes more than all `Storage` rows explain."""

    time_s: float
    unexplained_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps for the backward of the traced step.

    Several rows may name one storage, whose bytes count once. `released_s`: when autograd let go of it, or a plan had
    moved it to another tier; None: never, in this step. `node`: as in `Operator`, that of the node that keeps it.
    `copy_of`: the storage that was saved, where a plan keeps this one for it: codes in fewer bits, with `original_bytes`,
    the size of that storage; without, what is back from another tier, and `saved_s` is when room was made for it. None
    where the very storage is kept.
    `operator` is the one whose backward needs it, which need not be the one that made it; None where the
    run is older than this column, "" where no operator ran for it. `needs_gradient`: whether the tensor does; None in
    older runs.
    """

    storage_id: int
    module: str
    unit: str
    micro_batch: int
    size_bytes: int
    shape: str
    saved_s: float
    unpacked_s: float | None
    released_s: float | None
    operator: str | None = None
    needs_gradient: bool | None = None
    copy_of: int | None = None
    original_bytes: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module in the traced step, with gradients: phase is forward or recompute.

    Calls nest by time. `module` is "(Name)" for one that belongs to no discovered model. `takes_last`: it is called with
    nothing but the very tensor that the call before it, inside the same one, has returned, unchanged; None in older runs.
    `is_transformed`: inside a transform of torch.func (vmap), where an engine does nothing around it; None in older runs.
    """

    call_id: int
    module: str
    unit: str
    phase: str
    micro_batch: int
    start_s: float
    end_s: float
    takes_last: bool | None = None
    is_transformed: bool | None = None


@dataclass(frozen=True, slots=True)
class CallTensor:
    """A storage that a module call took or returned: role is input or output; that a hook of the module's has put in the place
    of what it was called with: late_input; or that a unit has put into a key/value cache that held nothing of it before: cache.

    `is_changed`: the call wrote into this input. `needs_gradient`: all tensors of this input on the storage do; None of
    outputs, and in older runs.
    """

    call_id: int
    storage_id: int
    role: str
    is_changed: bool
    needs_gradient: bool | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the traced step. FLOPs are 2 per multiply-add of matrix products and convolutions.

    `executed_flops` is what ran; `model_flops` leaves out recomputation (analyzers/utilization.py) and counts causal
    attention as the T(T+1)/2 pairs that the model needs.

    `shapes`, of those with matrix arithmetic: the two factors of a product, input and weight of a convolution or
    recurrent layer, (batch, heads, length, width) of query, key and value, as JSON. `read_bytes` and `written_bytes`:
    what the operator must move of its tensors, each element once (capture/traffic.py). `changes`: the storage that an
    operator in place (`aten::relu_`) writes into. `is_random`: it draws numbers from a generator; None in older runs.
    `operator_id` is what `OperatorRead` names it by. `node` is the same of the operators of a backward's node and of the
    first operator for which autograd had made that node; operators after it for which it made none have it too. None of
    both in older runs.
    """

    name: str
    module: str
    unit: str
    phase: str
    start_s: float
    end_s: float
    executed_flops: int
    model_flops: int
    shapes: str | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    changes: int | None = None
    is_random: bool | None = None
    operator_id: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class OperatorRead:
    """An operator was given a tensor on this storage."""

    operator_id: int
    storage_id: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective or point-to-point operation of a traced step.

    `size_bytes` is the full message: for all_gather the gathered tensor, for reduce_scatter its input,
    else the tensor. `sequence` counts the collectives of a group, so (group, sequence) matches ranks; for sends
    and receives it counts those of one direction with the same `peer` (the other side's rank in the world) and
    `tag`. `end_s` is true completion; wait times are None where nobody waited in Python. `module` is the
    innermost module that was running. `device_start_s`: when the device's stream had come to an operation that
    the device runs (NCCL), whose `end_s` is the device's too; None for what the host runs.
    """

    step: int
    operation: str
    group: str
    group_size: int
    sequence: int
    size_bytes: int
    dtype: str
    phase: str
    unit: str
    asynchronous: bool
    issue_s: float
    end_s: float | None
    wait_start_s: float | None
    wait_end_s: float | None
    module: str | None = None
    peer: int | None = None
    tag: int | None = None
    device_start_s: float | None = None


@dataclass(frozen=True, slots=True)
class Counter:
    """A sample of the process's and the device's own counters."""

    time_s: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    resident_bytes: int | None
    device_used_bytes: int | None
    device_utilization: float | None


TABLES: dict[str, type] = {
    "modules": Module,
    "units": Unit,
    "shard_groups": ShardGroup,
    "pipeline_stages": PipelineStage,
    "tensor_parallel": TensorParallel,
    "parameters": Parameter,
    "optimizer_states": OptimizerState,
    "steps": Step,
    "spans": Span,
    "storages": Storage,
    "residuals": Residual,
    "saved": Saved,
    "operators": Operator,
    "operator_reads": OperatorRead,
    "collectives": Collective,
    "counters": Counter,
    "module_calls": ModuleCall,
    "call_tensors": CallTensor,
    "segments": DeviceSegment,
    "allocator_states": AllocatorState,
    "out_of_memory": OutOfMemory,
    "live_storages": LiveStorage,
    "data_loaders": LoaderInfo,
    "data_waits": DataWait,
    "idle_casts": IdleCast,
    "autocast_off": AutocastOff,
    "transfers": Transfer,
}
