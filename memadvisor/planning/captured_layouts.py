"""The fastest layouts of a captured model that do not run out of memory, and the front of memory against time.

Every layout of the space (captured_space.py) is priced, none is left out by bounds. Of each, three ways of recomputation:
none, the units of least added time that make it fit, and all that free anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memadvisor.cost.layouts.captured import CapturedLayout, CapturedTimes, captured_times
from memadvisor.cost.layouts.chance import chance_of_more
from memadvisor.cost.layouts.rank_memory import StageMemory
from memadvisor.errors import UsageError
from memadvisor.layout import Layout
from memadvisor.planning.captured_memory import CapturedMemory
from memadvisor.planning.captured_space import CapturedQuestion, layouts, with_stages
from memadvisor.planning.layouts import FRONT_SLOWDOWN

NUM_BEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCapture:
    """A layout and what it is predicted to take; `memory` of the fullest device."""

    chosen: CapturedLayout
    times: CapturedTimes
    memory: StageMemory
    p_oom: float
    mfu: float

    @property
    def step_time_s(self) -> float:
        return self.times.step_time_s

    @property
    def layout(self) -> Layout:
        return self.chosen.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCaptures:
    """What a search found. `best` and `front` are safe.

    `best`: the fastest of each kind (pipeline, and what ZeRO shards: nothing, states, parameters too), fastest first.
    `front`: none takes both less memory and less time, up to FRONT_SLOWDOWN times the best time. `smallest`: the one that
    needs least memory, safe or not; None where no layout can run at all.
    """

    best: tuple[PricedCapture, ...]
    front: tuple[PricedCapture, ...]
    smallest: PricedCapture | None
    num_layouts: int
    num_unsafe: int
    num_failed: int
    all: tuple[PricedCapture, ...]


def search_captured(question: CapturedQuestion, memory: CapturedMemory) -> FoundCaptures:
    """Raises UsageError where the batch does not part among any number of replicas, or a link is not known."""
    priced: list[PricedCapture] = []
    num_failed = 0
    refused: UsageError | None = None
    for layout in layouts(question):
        for chosen in _ways(question, layout, memory):
            if chosen is None:
                num_failed += 1
                continue
            try:
                priced.append(price(question, chosen, memory))
            except UsageError as error:
                num_failed, refused = num_failed + 1, error
    if refused is not None and not priced:
        raise refused
    if not priced and not num_failed:
        raise UsageError(
            f"{question.batch_samples} samples a step do not part among {question.target.cluster.num_accelerators} accelerators"
            f" in micro-batches near the recorded one of {question.model.micro_batch_size}.",
            hint="give the samples of a step over all accelerators with --batch, a multiple of their number.",
        )
    safe = sorted((one for one in priced if one.p_oom < question.max_p_oom), key=_order)
    return FoundCaptures(
        best=_best(safe),
        front=_front(safe),
        smallest=min(priced, key=lambda one: one.memory.total_bytes, default=None),
        num_layouts=len(priced) + num_failed,
        num_unsafe=len(priced) - len(safe),
        num_failed=num_failed,
        all=tuple(priced),
    )


def _ways(question: CapturedQuestion, layout: Layout, memory: CapturedMemory) -> list[CapturedLayout | None]:
    """One for each choice of units to recompute; None where the chain has no cut with room."""
    choices = [frozenset[str]()]
    if memory.recomputable:
        if layout.pipeline == 1:
            room = memory.safe_tensor_bytes(layout, question.max_p_oom)
            fewest = memory.fewest_recomputed(layout, room)
            choices += [fewest] if fewest else []
        choices.append(memory.recomputable)
    found = []
    for recomputed in dict.fromkeys(choices):
        named = replace(layout, recompute="full" if recomputed else "none")
        found.append(with_stages(question, named, recomputed, memory))
    return found


def price(question: CapturedQuestion, chosen: CapturedLayout, memory: CapturedMemory) -> PricedCapture:
    """Raises UsageError where a link is not known or the schedule cannot run."""
    target, model = question.target, question.model
    times = captured_times(model, chosen, target)
    worst = memory.worst(chosen, times.pipeline)
    flops = model.model_flops * question.batch_samples
    peak = target.device.peak_flops_per_s * chosen.layout.num_ranks * times.step_time_s
    return PricedCapture(
        chosen=chosen,
        times=times,
        memory=worst,
        p_oom=chance_of_more(worst, target.device.memory_bytes, target.coefficients),
        mfu=flops / peak,
    )


def _order(one: PricedCapture) -> tuple[object, ...]:
    """By time; of equals (sums are rounded) what is simpler to set up."""
    layout = one.layout
    return (
        float(f"{one.step_time_s:.6g}"), layout.pipeline, layout.zero_stage, len(one.chosen.recomputed),
        layout.shard or layout.data, -layout.micro_batch_size,
    )  # fmt: skip


def _best(safe: list[PricedCapture]) -> tuple[PricedCapture, ...]:
    kept: dict[tuple[object, ...], PricedCapture] = {}
    for one in safe:
        layout = one.layout
        kind = (layout.pipeline, (layout.zero_stage + 1) // 2)
        kept.setdefault(kind, one)
    return tuple(kept.values())[:NUM_BEST]


def _front(safe: list[PricedCapture]) -> tuple[PricedCapture, ...]:
    front: list[PricedCapture] = []
    for one in safe:
        if one.step_time_s > FRONT_SLOWDOWN * safe[0].step_time_s:
            break
        if not front or one.memory.peak_bytes < front[-1].memory.peak_bytes:
            front.append(one)
    return tuple(front)
