"""The largest micro-batch, the longest sequence or the largest model that fits under each technique alone.

Fits: at most SAFE_P_OOM of such layouts run out of memory. Memory grows with each of the three, so the answer is found by
doubling and bisection over whole numbers, from memory alone; time is estimated once, for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.chance import chance_of_more
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.estimate import SAFE_P_OOM, StepEstimate, estimate_step
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.memory import device_contents, stage_memory
from memadvisor.cost.layouts.rank_memory import StageMemory
from memadvisor.cost.layouts.saved import chunk_saved_bytes
from memadvisor.cost.layouts.stages import stage_layers
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.planning.layout_space import divisors
from memadvisor.planning.scaled_model import scaled_model
from memadvisor.software_traits import Software

Quantity = Literal["micro-batch", "sequence", "model"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
Limit = Literal["memory", "positions", "searched"]

# Nobody asks beyond these: sequences of a microbatch, tokens of a sequence, layers.
_SEARCHED_TO: dict[Quantity, int] = {"micro-batch": 2**20, "sequence": 2**26, "model": 2**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestQuestion:
    """How large can `quantity` be on `cluster`? What it is not about stays: the model, `seq_len` (of no meaning where it is
    asked for), `micro_batch_size` (likewise), `target_len` of an encoder-decoder. `sequence_parallel`: what tensor
    parallelism comes with.
    """

    quantity: Quantity
    model: Architecture
    cluster: Cluster
    seq_len: int
    micro_batch_size: int = 1
    software: Software = field(default_factory=Software)
    sequence_parallel: bool = True
    target_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}.", hint="it is at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One way to make room, all accelerators in use, the rest of them replicas: `layout` has a micro-batch of 1."""

    name: str
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFit:
    """`value`: sequences, tokens or layers; `value` + `unit` is the next that was asked about. `limited_by`: what keeps it
    from being larger: memory, the model's learned table of positions, or the end of what is searched.

    `tokens_per_s`: of all accelerators.
    """

    value: int
    unit: int
    limited_by: Limit
    model: Architecture
    step: TrainingStep
    estimate: StepEstimate
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestAnswer:
    """`fit` is None where not even the smallest fits."""

    technique: Technique
    fit: LargestFit | None


def largest_fits(question: LargestQuestion, coefficients: Coefficients = FITTED) -> tuple[LargestAnswer, ...]:
    """One answer for each technique. Raises UsageError where a figure of the hardware is unknown."""
    return tuple(
        LargestAnswer(technique=technique, fit=_largest(question, technique, coefficients))
        for technique in techniques(question)
    )


def techniques(question: LargestQuestion) -> Iterator[Technique]:
    """Each without recomputation and with all of it."""
    for name, layout in _ways(question):
        for recompute in ("none", "full"):
            yield Technique(name=name, layout=replace(layout, recompute=recompute))


def _ways(question: LargestQuestion) -> Iterator[tuple[str, Layout]]:
    """ZeRO needs replicas to share with; state on the host a host (sharded as far as it goes: the optimizer's with stage 2,
    parameters too with stage 3). Tensor parallelism is within a node and divides the heads; pipelines have 2, 4, 8, ...
    stages of at least one layer each, and as many microbatches, run 1F1B."""
    model, cluster = question.model, question.cluster
    ranks = cluster.num_accelerators
    yield ("data parallel" if ranks > 1 else "plain"), Layout(data=ranks)
    for stage in (1, 2, 3) if ranks > 1 else ():
        yield f"ZeRO-{stage}", Layout(data=ranks, zero_stage=stage)
    if cluster.host is not None:
        yield (
            "ZeRO-2, optimizer on the host",
            Layout(data=ranks, zero_stage=2, offload_optimizer=True),
        )
        yield (
            "ZeRO-3, parameters and optimizer on the host",
            Layout(data=ranks, zero_stage=3, offload_optimizer=True, offload_parameters=True),
        )
    for tensor in divisors(cluster.per_node):
        if tensor > 1 and model.n_heads % tensor == 0:
            spread = question.sequence_parallel
            yield (
                f"tensor parallel {tensor}",
                Layout(data=ranks // tensor, tensor=tensor, sequence_parallel=spread),
            )
    stages = 2
    while ranks % stages == 0 and stages <= model.n_layers:
        layout = Layout(data=ranks // stages, pipeline=stages, num_microbatches=stages)
        if _has_stages(question, layout):
            yield f"pipeline {stages}", layout
        stages *= 2


def _has_stages(question: LargestQuestion, layout: Layout) -> bool:
    try:
        stage_layers(question.model, layout, question.software)
    except UsageError:
        return False
    return True


def _largest(question: LargestQuestion, technique: Technique, known: Coefficients) -> LargestFit | None:
    """Of the multiples of a unit: a sequence that tensor-parallel ranks share has as many tokens for each."""
    layout, quantity = technique.layout, question.quantity
    unit = layout.tensor if quantity == "sequence" and layout.sequence_parallel else 1
    lowest = max(layout.pipeline, question.model.num_stacks) if quantity == "model" else 1
    highest = _SEARCHED_TO[quantity] // unit
    has_table = quantity == "sequence" and question.model.positions > 0
    if has_table:
        highest = min(highest, question.model.positions // unit)

    def fits(count: int) -> bool:
        model, step = posed(question, technique, count * unit)
        return p_oom_of(model, step, question.cluster, known) < SAFE_P_OOM

    count = largest_that_holds(fits, lowest, highest)
    if count is None:
        return None
    model, step = posed(question, technique, count * unit)
    estimate = estimate_step(model, step, question.cluster, known)
    return LargestFit(
        value=count * unit,
        unit=unit,
        limited_by="memory" if count < highest else "positions" if has_table else "searched",
        model=model,
        step=step,
        estimate=estimate,
        tokens_per_s=step.tokens / estimate.step_time_s,
    )


def posed(question: LargestQuestion, technique: Technique, value: int) -> tuple[Architecture, TrainingStep]:
    """The model and the step with which `value` is tried. Relatives of the model are dealt out to pipeline stages as evenly
    as can be: by cost, a deeper model can leave a stage less to hold."""
    quantity, layout, software = question.quantity, technique.layout, question.software
    model = question.model
    if quantity == "model":
        model = scaled_model(model, value)
        software = replace(software, stage_rule="even")
    size = value if quantity == "micro-batch" else question.micro_batch_size
    return model, TrainingStep(
        layout=replace(layout, micro_batch_size=size),
        seq_len=value if quantity == "sequence" else question.seq_len,
        software=software,
        target_len=question.target_len,
    )


def largest_that_holds(holds: Callable[[int], bool], lowest: int, highest: int) -> int | None:
    """The largest whole number from `lowest` to `highest` of a condition that, once broken, stays so; None if there is none."""
    if lowest > highest or not holds(lowest):
        return None
    good, step = lowest, 1
    bad = highest + 1
    while good + step < bad:
        if holds(good + step):
            good, step = good + step, 2 * step
        else:
            bad = good + step
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good


def p_oom_of(
    model: Architecture, step: TrainingStep, cluster: Cluster, coefficients: Coefficients = FITTED
) -> float:
    """`estimate_step(...).p_oom` of a step without a pipeline or with 1F1B, one chunk a device, without playing it."""
    device = device_of(cluster.accelerator, step.software.compute_dtype, coefficients)
    return max(
        chance_of_more(memory, device.memory_bytes, coefficients)
        for memory in _memories(model, step, coefficients)
    )


def _memories(model: Architecture, step: TrainingStep, coefficients: Coefficients) -> Iterator[StageMemory]:
    """Of each device."""
    layout = step.layout
    layers = stage_layers(model, layout, step.software)
    for device in range(layout.pipeline):
        contents = device_contents((device,), layers)
        saved = chunk_saved_bytes(model, step, contents.layers)
        in_flight = min(layout.pipeline - device, layout.num_microbatches)
        yield stage_memory(model, step, contents, in_flight * round(saved), coefficients)
