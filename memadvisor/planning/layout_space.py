"""Every layout of a number of accelerators for one model and one batch: the space that the search is exact over.

What it holds is said by `LayoutQuestion` and by the loops here; docs/layouts.md has it as a table. Two names for one
layout (a schedule without a pipeline, sharding among one replica) are in it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations

from memadvisor.architecture import Architecture
from memadvisor.cost.pipelines.schedules import check_schedule
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import RECOMPUTE, Layout, TrainingStep
from memadvisor.software_traits import Software
from memadvisor.zeropp_options import ZeroPP, zeropp_fields

# Those that every trainer of today runs. The others split backwards, hold weights twice or change the training (2BW): they
# are searched when they are named.
USUAL_SCHEDULES = ("1f1b", "interleaved", "breadth-first", "gpipe")
USUAL_MAX_P_OOM = 0.10
# Of a sequence on each of the ranks that share it: fewer are not worth a message to the next one.
LEAST_CONTEXT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuestion:
    """Which layout trains `batch_sequences` sequences of `seq_len` tokens a step fastest on `cluster`?

    `widest_tensor`: of tensor parallelism, None for a node. `schedules`, `recompute`: those that may be used. `offload`:
    the optimizer's state may live on the host. `max_p_oom`: a layout that is likelier than this to run out of memory
    is no answer. `target_len`: of an encoder-decoder. `zeropp`: options of ZeRO++ of which any may be used.
    """

    model: Architecture
    cluster: Cluster
    seq_len: int
    batch_sequences: int
    software: Software = field(default_factory=Software)
    widest_tensor: int | None = None
    schedules: tuple[str, ...] = USUAL_SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE
    offload: bool = True
    max_p_oom: float = USUAL_MAX_P_OOM
    target_len: int | None = None
    zeropp: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_sequences"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}.", hint="it is at least 1.")
        if not 0 < self.max_p_oom <= 1:
            raise UsageError(
                f"the accepted chance of running out of memory is {self.max_p_oom}.", hint="it is 0 to 1."
            )

    def step(self, layout: Layout) -> TrainingStep:
        return TrainingStep(
            layout=layout, seq_len=self.seq_len, software=self.software, target_len=self.target_len
        )


@dataclass(frozen=True, slots=True)
class Split:
    """How many ranks share what: the product of the first four is the number of accelerators."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What one microbatch's work on a device depends on, wherever its stage begins."""

    tensor: int
    context: int
    expert: int
    sequence_parallel: bool
    context_kind: str
    micro_batch_size: int
    recompute: str


@dataclass(frozen=True, slots=True)
class States:
    """Where parameters, gradients and the optimizer's state are."""

    zero_stage: int
    shard: int | None
    offload_optimizer: bool
    zeropp: tuple[str, ...] = ()

    def zeropp_fields(self, cluster: Cluster, split: Split) -> ZeroPP:
        ranks = (split.data if self.shard is None else self.shard) * split.context
        return zeropp_fields(self.zeropp, shard_ranks=ranks, tensor=split.tensor, per_node=cluster.per_node)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def splits(question: LayoutQuestion) -> Iterator[Split]:
    """Tensor-parallel groups lie within a node, or fill whole ones where `widest_tensor` allows."""
    model, cluster = question.model, question.cluster
    per_node, number = cluster.per_node, cluster.num_accelerators
    widest = question.widest_tensor or per_node
    for tensor in divisors(number):
        aligned = per_node % tensor == 0 or tensor % per_node == 0
        if tensor > widest or not aligned or not _parts_heads(model, tensor):
            continue
        for pipeline in divisors(number // tensor):
            if pipeline > model.n_layers + 2:
                continue
            for context in divisors(number // tensor // pipeline):
                data = number // (tensor * pipeline * context)
                if context > 1 and model.encoder_layers:  # not modelled
                    continue
                if question.seq_len % context or question.batch_sequences % data:
                    continue
                if context > 1 and question.seq_len // context < LEAST_CONTEXT_TOKENS:
                    continue
                for expert in _experts(model, data * context):
                    yield Split(data, tensor, pipeline, context, expert)


def _parts_heads(model: Architecture, tensor: int) -> bool:
    """Whether so many ranks have whole heads each, of attention and of recurrences, where the model has any."""
    layers = [layer for _, layer in model.kinds().values()]
    attends = any(map(model.has_attention, layers))
    recurrent = model.recurrence if any(map(model.has_recurrence, layers)) else None
    return not (
        (attends and model.n_heads % tensor) or (recurrent is not None and recurrent.n_heads % tensor)
    )


def _experts(model: Architecture, replicas: int) -> tuple[int, ...]:
    if model.experts is None:
        return (1,)
    return tuple(n for n in divisors(model.experts.num_experts) if replicas % n == 0)


def works(question: LayoutQuestion, split: Split) -> Iterator[DeviceWork]:
    """Micro-batch sizes divide a replica's batch."""
    sequence_parallel = (True, False) if split.tensor > 1 else (False,)
    kinds = ("ring", "ulysses") if split.context > 1 else ("ring",)
    ways = [how for how in question.recompute if how != "selective" or question.software.has_selective]
    for size in divisors(question.batch_sequences // split.data):
        for spread in sequence_parallel:
            for kind in kinds:
                for how in ways:
                    yield DeviceWork(split.tensor, split.context, split.expert, spread, kind, size, how)


def _chunks(n_layers: int, num_stages: int) -> tuple[int, ...]:
    several = {
        stages // num_stages
        for units in (n_layers, n_layers + 1, n_layers + 2)
        for stages in divisors(units)
        if stages % num_stages == 0 and stages <= n_layers
    }
    return tuple(sorted({1, *several}))


@lru_cache(maxsize=4096)
def pipelines(
    schedules: tuple[str, ...], n_layers: int, num_stages: int, num_microbatches: int
) -> tuple[tuple[str, int], ...]:
    """(schedule, chunks) that can run. Several chunks a device are alike in layers, the embedding or the head or both
    counted as one, as trainers ask for."""
    if num_stages == 1:
        return (("1f1b", 1),)
    found = []
    for schedule in schedules:
        for chunks in _chunks(n_layers, num_stages):
            # One chunk of these is 1f1b and gpipe under another name.
            if chunks == 1 and schedule in ("interleaved", "breadth-first"):
                continue
            try:
                check_schedule(schedule, num_stages, num_microbatches, chunks)
            except UsageError:
                continue
            found.append((schedule, chunks))
    return tuple(found)


def states(question: LayoutQuestion, split: Split) -> tuple[States, ...]:
    """ZeRO stages with the groups that share shards; offloading where the link to the host is known."""
    offload = (False, True) if question.offload and question.cluster.host is not None else (False,)
    plain = _states(split.data, split.context, offload)
    if not question.zeropp:
        return plain
    return (*plain, *_with_zeropp(question, split, plain))


@lru_cache(maxsize=4096)
def _states(data: int, context: int, offload: tuple[bool, ...]) -> tuple[States, ...]:
    ways: list[tuple[int, int | None]] = [(0, None)]
    for stage in (1, 2, 3):
        for shard in divisors(data):
            if shard * context > 1:
                ways.append((stage, None if shard == data else shard))
    return tuple(States(stage, shard, host) for stage, shard in ways for host in offload)


def _with_zeropp(question: LayoutQuestion, split: Split, plain: tuple[States, ...]) -> Iterator[States]:
    """Each subset of the named options."""
    for held in plain:
        ranks = (split.data if held.shard is None else held.shard) * split.context
        useful = useful_zeropp(question.zeropp, question.cluster, split.tensor, ranks)
        for number in range(1, len(useful) + 1 if held.zero_stage == 3 else 1):
            for names in combinations(useful, number):
                yield replace(held, zeropp=names)


def useful_zeropp(names: tuple[str, ...], cluster: Cluster, tensor: int, shard_ranks: int) -> tuple[str, ...]:
    """Without hpZ where shards are in one node: its copy would be the shards again."""
    fields = zeropp_fields(("hpz",), shard_ranks=shard_ranks, tensor=tensor, per_node=cluster.per_node)
    return tuple(name for name in names if name != "hpz" or fields["secondary_shard"] != shard_ranks)


def make_layout(
    question: LayoutQuestion, split: Split, work: DeviceWork, schedule: str, chunks: int, held: States
) -> Layout:
    return Layout(
        data=split.data,
        tensor=split.tensor,
        pipeline=split.pipeline,
        context=split.context,
        expert=split.expert,
        zero_stage=held.zero_stage,
        shard=held.shard,
        chunks=chunks,
        schedule=schedule,
        sequence_parallel=work.sequence_parallel,
        context_kind=work.context_kind,
        micro_batch_size=work.micro_batch_size,
        num_microbatches=question.batch_sequences // split.data // work.micro_batch_size,
        recompute=work.recompute,
        offload_optimizer=held.offload_optimizer,
        **held.zeropp_fields(question.cluster, split),
    )


def all_layouts(question: LayoutQuestion) -> Iterator[Layout]:
    """One by one, for spaces that are small enough to be walked through."""
    for split in splits(question):
        for work in works(question, split):
            count = question.batch_sequences // split.data // work.micro_batch_size
            for schedule, chunks in pipelines(
                question.schedules, question.model.n_layers, split.pipeline, count
            ):
                for held in states(question, split):
                    yield make_layout(question, split, work, schedule, chunks, held)
