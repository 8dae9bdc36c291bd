"""Why a layout is among the best: what of its step does no product, and what its neighbours would take.

A neighbour has one thing of the layout changed (tensor parallelism halved, say, for twice the replicas) and the rest as it
is, as far as that can be; each is estimated. Nothing is said of neighbours that are not in the searched space, but for one:
the same pipeline with its layers dealt out to stages by their costs (modelled_split.py), which no search tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from memadvisor.cost.layouts.estimate import StepEstimate, estimate_step
from memadvisor.errors import UsageError
from memadvisor.layout import Layout
from memadvisor.planning.layout_space import LayoutQuestion, Split, divisors, pipelines, splits, useful_zeropp
from memadvisor.planning.modelled_split import with_balanced_stages
from memadvisor.planning.priced_layouts import Priced
from memadvisor.units import format_bytes
from memadvisor.zeropp_options import ZeroPP, zeropp_fields

# Shares and differences below this are not worth a word.
_SMALL = 0.005
_DEGREES = (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp"), ("expert", "ep"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """`change`: what is other than in the layout. `total_bytes`: of the fullest device, the driver's share with it.
    `is_safe`: the chance of running out of memory is accepted. `step_time_ratio`: to the layout's.
    """

    change: str
    layout: Layout
    total_bytes: float
    p_oom: float
    is_safe: bool
    step_time_s: float
    step_time_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """All predicted. `spent`: shares of the step, by what they go to. `plain`: data parallelism alone, with the fastest
    microbatch that is safe, one sequence where none is (None where the batch does not part among so many replicas, or
    where it is the layout itself). `memory_bytes`: of an accelerator. `balanced`: stages of other numbers of layers,
    where that is faster and safe.
    """

    spent: dict[str, float]
    memory_bytes: int
    plain: Neighbour | None
    balanced: Neighbour | None
    neighbours: tuple[Neighbour, ...]


def explain(question: LayoutQuestion, priced: Priced) -> Reason:
    known = frozenset(splits(question))
    neighbours = []
    for change, layout in _changed(question, priced.layout, known):
        neighbour = _neighbour(question, priced, change, layout)
        if neighbour is not None:
            neighbours.append(neighbour)
    return Reason(
        spent=_spent(priced),
        memory_bytes=priced.estimate.memory_bytes,
        plain=_plain(question, priced),
        balanced=_balanced(question, priced),
        neighbours=tuple(neighbours),
    )


def _plain(question: LayoutQuestion, priced: Priced) -> Neighbour | None:
    replicas = question.cluster.num_accelerators
    each, over = divmod(question.batch_sequences, replicas)
    found: list[Neighbour] = []
    size = 1
    while not over and each % size == 0:
        layout = Layout(data=replicas, micro_batch_size=size, num_microbatches=each // size)
        if layout == priced.layout:
            return None
        one = _neighbour(question, priced, f"plain dp {replicas}", layout)
        if one is None:
            break
        found.append(one)
        if not one.is_safe:
            break
        size *= 2
    safe = [one for one in found if one.is_safe]
    return min(safe, key=lambda one: one.step_time_s) if safe else next(iter(found), None)


def _balanced(question: LayoutQuestion, priced: Priced) -> Neighbour | None:
    """Of pipelines with one part of the model on each device."""
    layout = priced.layout
    if layout.pipeline == 1 or layout.chunks > 1 or layout.schedule not in ("1f1b", "gpipe"):
        return None
    try:
        step = with_balanced_stages(question.model, question.step(layout), question.cluster)
    except UsageError:  # no split is likely enough to fit
        return None
    found = _neighbour(question, priced, "layers dealt out by their costs", step.layout)
    if found is None or not found.is_safe or found.step_time_ratio > 1 - _SMALL:
        return None
    return found


def _spent(priced: Priced) -> dict[str, float]:
    estimate = priced.estimate
    spent_s = {
        "exposed collectives": estimate.time_s["tensor_context_expert_collectives"]
        + estimate.time_s["gradients_and_parameters"],
        "sharded parameters": estimate.time_s["sharded_parameters"],
        "pipeline bubble": estimate.time_s["pipeline_bubble"],
        "recomputation": estimate.time_s["recompute"],
    }
    if priced.layout.offload_optimizer:
        spent_s["optimizer on the host"] = estimate.time_s["optimizer"]
    return {what: seconds / estimate.step_time_s for what, seconds in spent_s.items()}


def _neighbour(question: LayoutQuestion, priced: Priced, change: str, layout: Layout) -> Neighbour | None:
    """None where the cost model refuses it."""
    try:
        estimate: StepEstimate = estimate_step(question.model, question.step(layout), question.cluster)
    except UsageError:
        return None
    return Neighbour(
        change=change,
        layout=layout,
        total_bytes=estimate.worst.total_bytes,
        p_oom=estimate.p_oom,
        is_safe=estimate.p_oom < question.max_p_oom,
        step_time_s=estimate.step_time_s,
        step_time_ratio=estimate.step_time_s / priced.estimate.step_time_s,
    )


def _changed(
    question: LayoutQuestion, layout: Layout, known: frozenset[Split]
) -> Iterator[tuple[str, Layout]]:
    """Less of each thing that the layout uses; more of tensor and pipeline parallelism."""
    for name, short in _DEGREES:
        degree: int = getattr(layout, name)
        fewer = [n for n in divisors(degree) if n < degree][-1:]
        more = [degree * n for n in divisors(layout.data)[1:2]] if name in ("tensor", "pipeline") else []
        for other in (*fewer, *more):
            changed = _with_degree(question, layout, name, other, known)
            if changed is not None:
                yield f"{short} {other}", changed
    if layout.zero_stage:
        stage = layout.zero_stage - 1
        shard = layout.shard if stage else None
        yield f"ZeRO {stage}", replace(layout, zero_stage=stage, shard=shard, **_zeropp(question, layout, ()))
    for name in layout.zeropp:
        rest = tuple(other for other in layout.zeropp if other != name)
        yield f"no {name}", replace(layout, **_zeropp(question, layout, rest))
    if layout.offload_optimizer:
        yield "the optimizer on the device", replace(layout, offload_optimizer=False)
    ways = [how for how in question.recompute if how != "selective" or question.software.has_selective]
    less = ways[: ways.index(layout.recompute)][-1:]
    for how in less:
        name = "no" if how == "none" else how
        yield f"{name} recomputation", replace(layout, recompute=how)


def _zeropp(question: LayoutQuestion, layout: Layout, names: tuple[str, ...]) -> ZeroPP:
    """These options of ZeRO++ on its ranks."""
    per_node = question.cluster.per_node
    return zeropp_fields(names, shard_ranks=layout.shard_ranks, tensor=layout.tensor, per_node=per_node)


def _with_degree(
    question: LayoutQuestion, layout: Layout, name: str, degree: int, known: frozenset[Split]
) -> Layout | None:
    """Replicas make up for it, and a microbatch's sequences for context parallelism, so that a device has as many tokens
    of one. None outside of the searched space."""
    degrees = {each: getattr(layout, each) for each in ("tensor", "pipeline", "context", "expert")}
    degrees[name] = degree
    inner = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    data = question.cluster.num_accelerators // inner
    if Split(data, **degrees) not in known:
        return None
    each = question.batch_sequences // data
    sequences = layout.micro_batch_size * degrees["context"] // layout.context
    size = gcd(max(1, sequences), each)
    ways = pipelines(question.schedules, question.model.n_layers, degrees["pipeline"], each // size)
    way = (layout.schedule, layout.chunks)
    if way not in ways:
        if not ways:
            return None
        way = ("1f1b", 1) if ("1f1b", 1) in ways else ways[0]
    shard = layout.shard
    if shard is not None and (data % shard or shard == data):
        shard = None
    is_sharded = (shard or data) * degrees["context"] > 1
    plain = replace(layout, **_zeropp(question, layout, ()))
    changed = replace(
        plain,
        **degrees,
        data=data,
        zero_stage=layout.zero_stage if is_sharded else 0,
        shard=shard if is_sharded else None,
        schedule=way[0],
        chunks=way[1],
        sequence_parallel=layout.sequence_parallel and degrees["tensor"] > 1,
        context_kind=layout.context_kind if degrees["context"] > 1 else "ring",
        micro_batch_size=size,
        num_microbatches=each // size,
    )
    names = useful_zeropp(layout.zeropp, question.cluster, changed.tensor, changed.shard_ranks)
    return replace(changed, **_zeropp(question, changed, names if is_sharded else ()))


def reason_words(reason: Reason) -> str:
    """One line."""
    parts = [f"{share:.0%} {what}" for what, share in reason.spent.items() if share >= _SMALL]
    sentences = [f"Of the step: {', '.join(parts)}." if parts else "Nothing but computation."]
    if reason.plain is not None:
        sentences.append(_plain_words(reason.plain, reason.memory_bytes))
    if reason.balanced is not None:
        sentences.append(f"--split balanced: {_time_words(reason.balanced)}.")
    large = [one for one in reason.neighbours if not one.is_safe]
    if large:
        words = ", ".join(f"{one.change} ({_memory_words(one, reason.memory_bytes)})" for one in large)
        sentences.append(f"Too large for {format_bytes(reason.memory_bytes)} with: {words}.")
    safe = [one for one in reason.neighbours if one.is_safe]
    for title, chosen in (
        ("Slower", [one for one in safe if one.step_time_ratio - 1 >= _SMALL]),
        ("As fast", [one for one in safe if abs(one.step_time_ratio - 1) < _SMALL]),
        ("Faster", [one for one in safe if one.step_time_ratio - 1 <= -_SMALL]),
    ):
        if chosen:
            words = ", ".join(_time_words(one) for one in chosen)
            sentences.append(f"{title} with: {words}.")
    return " ".join(sentences)


def _plain_words(plain: Neighbour, memory_bytes: int) -> str:
    if not plain.is_safe:
        memory = format_bytes(memory_bytes)
        return f"{plain.change.capitalize()} needs {_memory_words(plain, memory_bytes)} of {memory}."
    return f"{plain.change.capitalize()} fits: {plain.step_time_ratio - 1:+.1%} time."


def _memory_words(one: Neighbour, memory_bytes: int) -> str:
    size = format_bytes(round(one.total_bytes))
    return size if one.total_bytes > memory_bytes else f"{size}, p(OOM) {one.p_oom:.0%}"


def _time_words(one: Neighbour) -> str:
    difference = one.step_time_ratio - 1
    return one.change if abs(difference) < _SMALL else f"{one.change} ({difference:+.1%})"
