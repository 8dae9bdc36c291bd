"""What a profiled process leaves behind of the parallelism that its script has set up itself.

As in records.py each class is one table of the journal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Parameters that the script's own FSDP2 gathers and reduces together: of a module that `fully_shard` was called
    on, those that no such module inside it has.

    `name` is that of the first module, where it was called on several at once. `num_ranks` share them, and
    `num_replicas` such sets of ranks hold the same (hybrid sharding). `reshards`: the full parameters are freed after the
    forward; `forward_ranks`: to parts of so many ranks that follow each other, and not of all that share them. `max_inputs`:
    so many reductions' inputs are kept at most. `gathers_in_backward`: false where the script says that no backward needs
    the parameters (`set_unshard_in_backward`). `is_plain`: sharded by rows. Older versions recorded none of the last three, and
    `is_plain` false where one of them is another than here by default.
    """

    name: str
    num_ranks: int
    num_replicas: int
    reshards: bool
    param_dtype: str | None
    reduce_dtype: str | None
    offloads: bool
    is_plain: bool
    forward_ranks: int | None = None
    max_inputs: int = 1
    gathers_in_backward: bool = True


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model (named as by units) whose layers the script has split over `num_ranks` ranks, which train on the same samples.
    Its parameters and units are recorded with what this rank has of them.
    """

    model: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A stage of a `torch.distributed.pipelining` schedule that this process holds: `model` names its module.

    `index` of `num_stages`, `position` of `num_ranks` in the pipeline's group. `schedule`: the class of the schedule that
    runs it, which cuts a batch into `num_micro_batches`; `splits_backward`: gradients of inputs and of weights come in two
    passes of autograd. `first_rank`: of the pipeline's group, by which pipelines beside each other are told apart; not recorded
    by versions that knew of one pipeline alone.
    """

    model: str
    index: int
    num_stages: int
    position: int
    num_ranks: int
    schedule: str
    num_micro_batches: int
    splits_backward: bool
    first_rank: int | None = None
