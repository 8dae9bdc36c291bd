"""The layouts of a captured model on a cluster: data parallelism and ZeRO, micro-batches, pipeline stages along its chain.

Tensor, context and expert parallelism change what each operator does, which a run does not show; they need a described
model (`memadvisor estimate --model`). Micro-batches are at most 8 times smaller or larger than the recorded one, and
whole multiples or parts of it, for bytes and times are scaled in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memadvisor.cost.captured_units import CapturedModel
from memadvisor.cost.layouts.captured import CapturedLayout
from memadvisor.cost.layouts.captured_times import Target
from memadvisor.errors import UsageError
from memadvisor.layout import Layout
from memadvisor.planning.captured_memory import CapturedMemory, saved_bytes
from memadvisor.planning.layout_space import USUAL_MAX_P_OOM, divisors
from memadvisor.planning.stage_split import StageLimit, UnitCost, split_stages

MOST_SCALED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedQuestion:
    """Which layout of the target's accelerators trains `batch_samples` a step fastest?"""

    model: CapturedModel
    target: Target
    batch_samples: int
    max_p_oom: float = USUAL_MAX_P_OOM

    def __post_init__(self) -> None:
        if self.batch_samples < 1:
            raise UsageError(f"--batch is {self.batch_samples}.", hint="it is at least 1.")


def chain_pieces(model: CapturedModel) -> list[int]:
    """How many units each piece of the chain has that no cut goes through."""
    pieces, count = [], 0
    for unit in model.units:
        count += 1
        if unit.cut_bytes is not None:
            pieces.append(count)
            count = 0
    return [*pieces, count] if count else pieces


def why_no_pipeline(model: CapturedModel) -> str | None:
    """None where the chain can be cut somewhere."""
    if len(chain_pieces(model)) > 1:
        return None
    reasons = [unit.no_cut for unit in model.units[:-1]]
    return f"The units form no chain that could be cut into pipeline stages: {(reasons or ['there is one unit'])[0]}."


def micro_batches(question: CapturedQuestion, data: int) -> list[int]:
    recorded = question.model.micro_batch_size
    found = []
    for size in divisors(question.batch_samples // data):
        large, small = max(size, recorded), min(size, recorded)
        if large % small == 0 and large // small <= MOST_SCALED:
            found.append(size)
    return found


def layouts(question: CapturedQuestion) -> Iterator[Layout]:
    """All but what is recomputed and where the chain is cut."""
    number = question.target.cluster.num_accelerators
    for pipeline in divisors(number):
        data = number // pipeline
        if pipeline > len(chain_pieces(question.model)) or question.batch_samples % data:
            continue
        for size in micro_batches(question, data):
            count = question.batch_samples // data // size
            yield _layout(data, pipeline, size, count, 0, None)
            for stage in (1, 2, 3):
                for shard in divisors(data)[1:]:
                    yield _layout(data, pipeline, size, count, stage, None if shard == data else shard)


def _layout(data: int, pipeline: int, size: int, count: int, stage: int, shard: int | None) -> Layout:
    return Layout(
        data=data, pipeline=pipeline, micro_batch_size=size, num_microbatches=count, zero_stage=stage, shard=shard
    )  # fmt: skip


def with_stages(
    question: CapturedQuestion, layout: Layout, recomputed: frozenset[str], memory: CapturedMemory
) -> CapturedLayout | None:
    """Cut by the recurrence of stage_split.py, within the room of each stage under 1F1B; None where nothing has room."""
    model, target = question.model, question.target
    if layout.pipeline == 1:
        return CapturedLayout(layout=layout, recomputed=recomputed, stage_units=(len(model.units),))
    pieces = chain_pieces(model)
    share = layout.micro_batch_size / model.micro_batch_size
    whole = CapturedLayout(layout=layout, recomputed=recomputed, stage_units=())
    room = memory.safe_tensor_bytes(layout, question.max_p_oom) - model.other_bytes
    costs: list[UnitCost] = []
    work_bytes, start = 0.0, 0
    for number in pieces:
        units = model.units[start : start + number]
        start += number
        held = memory.stage(units, whole, 0)
        work_bytes = max(work_bytes, held.buffer_bytes)
        again = sum(unit.recompute_s for unit in units if unit.name in recomputed)
        first = sum(unit.forward.seconds for unit in units if unit.name in recomputed)
        forward_s = sum(target.pass_seconds(unit.forward, share) for unit in units)
        again_s = sum(target.pass_seconds(u.forward, share) for u in units if u.name in recomputed)
        costs.append(
            UnitCost(
                name=units[-1].name,
                forward_s=forward_s,
                backward_s=sum(target.pass_seconds(unit.backward, share) for unit in units)
                + (again_s * again / first if first else 0.0),
                state_bytes=held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes,
                saved_bytes=share * sum(saved_bytes(unit, recomputed) for unit in units),
            )
        )
    limits = [
        StageLimit(
            memory_bytes=room - work_bytes,
            num_in_flight=min(layout.pipeline - stage, layout.num_microbatches),
        )
        for stage in range(layout.pipeline)
    ]
    split = split_stages(costs, limits, layout.num_microbatches)
    if split is None:
        return None
    stage_units, start = [], 0
    for number in split.num_units:
        stage_units.append(sum(pieces[start : start + number]))
        start += number
    return CapturedLayout(layout=layout, recomputed=recomputed, stage_units=tuple(stage_units))
