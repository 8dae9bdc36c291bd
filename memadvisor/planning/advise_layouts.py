"""From a recorded run and a cluster to ranked layouts, with what each spends and what its neighbours would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memadvisor.analyzers.captured_units import captured_model
from memadvisor.analyzers.own_checkpoints import own_checkpoints
from memadvisor.analyzers.planned_models import fingerprint_of
from memadvisor.analyzers.segments import RecordedStep
from memadvisor.cost.captured_units import CapturedModel
from memadvisor.cost.layouts.captured_times import Target, is_host, target_of
from memadvisor.cost.step import CapturedStep
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.hardware.hardware import Hardware
from memadvisor.plan import Plan
from memadvisor.planning.captured_layouts import FoundCaptures, PricedCapture, search_captured
from memadvisor.planning.captured_memory import CapturedMemory
from memadvisor.planning.captured_space import CapturedQuestion, why_no_pipeline
from memadvisor.planning.several_models import check_single
from memadvisor.run.run import Run
from memadvisor.units import format_bytes, format_seconds

_SMALL = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedAdvice:
    """`plan`: of the fastest of the best layouts without a pipeline, as `run --plan` applies it; None where there is none.
    `notes`: what the reader should know."""

    question: CapturedQuestion
    found: FoundCaptures
    plan: Plan | None
    notes: tuple[str, ...]


def advise_layouts(
    run: Run,
    cluster: Cluster,
    *,
    recorded_on: Hardware | None = None,
    batch_samples: int | None = None,
    memory_bytes: int | None = None,
) -> CapturedAdvice:
    """`recorded_on`: the machine of the run, where its name is not in the catalogue. `batch_samples`: of a step over all
    accelerators; the run's own where it is None. `memory_bytes`: of an accelerator (on a host of a
    rank), in place of what is known of it. Raises UsageError where something that the prediction needs is unknown.
    """
    check_single(run.ranks[0], "layouts are worked out")
    recorded = RecordedStep(run)
    step = recorded.captured()
    model = captured_model(run, step)
    if memory_bytes is None and cluster.accelerator.memory_bytes is None:
        raise UsageError(
            f"How much memory a rank on {cluster.accelerator.name} may take is not known.",
            hint="give it: --memory 4GiB.",
        )
    if memory_bytes is not None:
        cluster = replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=memory_bytes))
    target = target_of(model, cluster, recorded_on)
    question = CapturedQuestion(
        model=model,
        target=target,
        batch_samples=model.batch_samples if batch_samples is None else batch_samples,
    )
    memory = CapturedMemory(recorded, step, model, target)
    found = search_captured(question, memory)
    return CapturedAdvice(
        question=question,
        found=found,
        plan=_plan(run, found, memory),
        notes=tuple(_notes(run, model, step, target, found)),
    )


def _plan(run: Run, found: FoundCaptures, memory: CapturedMemory) -> Plan | None:
    first = next((one for one in found.best if one.layout.pipeline == 1), None)
    if first is None:
        return None
    names = fingerprint_of(run.ranks[0])
    plan, prediction = memory.plan(first.chosen)
    prediction = replace(
        prediction,
        step_time_s=first.step_time_s,
        exposed_communication_s=first.times.time_s["gradients_and_parameters"]
        + first.times.time_s["sharded_parameters"],
        components_s=None,
        exposed_transfer_s=None,
    )
    return replace(plan, fingerprint=names, prediction=prediction, why="the fastest layout found")


def reason_of(advice: CapturedAdvice, one: PricedCapture) -> str:
    """What of the step is no unit's own work, and what the layout would take with one thing changed, as `estimate` says it."""
    spent = {
        "exposed gradients and parameters": one.times.time_s["gradients_and_parameters"]
        + one.times.time_s["sharded_parameters"],
        "pipeline bubble": one.times.time_s["pipeline_bubble"],
        "recomputation": one.times.time_s["recompute"],
        "optimizer": one.times.time_s["optimizer"],
        "outside of the model": one.times.time_s["outside"],
    }
    shares = [
        f"{seconds / one.step_time_s:.0%} {what}"
        for what, seconds in spent.items()
        if seconds >= _SMALL * one.step_time_s
    ]
    sentences = [f"Of the step: {', '.join(shares)}." if shares else "Nothing but computation."]
    large, timed = [], []
    for change, other in _neighbours(advice, one):
        if other.p_oom >= advice.question.max_p_oom:
            large.append(
                f"{change} ({format_bytes(round(other.memory.total_bytes))}, p(OOM) {other.p_oom:.0%})"
            )
        else:
            timed.append(
                f"{change} {other.step_time_s / one.step_time_s - 1:+.1%} ({format_seconds(other.step_time_s)})"
            )
    if large:
        memory = format_bytes(advice.question.target.device.memory_bytes)
        sentences.append(f"Too large for {memory} with: {', '.join(large)}.")
    if timed:
        sentences.append(f"Time with: {', '.join(timed)}.")
    return " ".join(sentences)


def _neighbours(advice: CapturedAdvice, one: PricedCapture) -> Iterator[tuple[str, PricedCapture]]:
    """Those of the space that differ in one thing: a ZeRO stage lower or higher, no recomputation, the micro-batch."""
    mine = one.layout
    for other in advice.found.all:
        theirs = other.layout
        if theirs.pipeline != mine.pipeline or other is one:
            continue
        same_size = theirs.micro_batch_size == mine.micro_batch_size
        same_again = other.chosen.recomputed == one.chosen.recomputed
        same_states = (theirs.zero_stage, theirs.shard) == (mine.zero_stage, mine.shard)
        if same_size and same_again and theirs.shard == (mine.shard if theirs.zero_stage else None):
            if abs(theirs.zero_stage - mine.zero_stage) == 1:
                yield f"ZeRO {theirs.zero_stage}", other
        elif same_size and same_states and one.chosen.recomputed and not other.chosen.recomputed:
            yield "no recomputation", other
        elif same_states and same_again:
            large = max(theirs.micro_batch_size, mine.micro_batch_size)
            if large == 2 * min(theirs.micro_batch_size, mine.micro_batch_size):
                yield f"micro-batch {theirs.micro_batch_size}", other


def _notes(
    run: Run, model: CapturedModel, step: CapturedStep, target: Target, found: FoundCaptures
) -> Iterator[str]:
    cluster = target.cluster
    if target.roofs is not None:
        yield (
            f"Each unit's measured times are scaled from {model.device_name} to {cluster.accelerator.name} by what both "
            f"rooflines allow in {model.dtype}; how near a unit comes to its roof may differ."
        )
    if model.on_cpu and not is_host(cluster.accelerator):
        yield "Recorded on a CPU: what operators allocate inside themselves on a GPU may differ."
    yield (
        "Times and activations are in proportion to the micro-batch; small ones are less efficient than that says."
    )
    reason = why_no_pipeline(model)
    if reason is not None:
        yield reason
    elif any(one.layout.pipeline > 1 for one in (*found.best, *found.front)):
        yield (
            "Stages of a pipeline are predicted by adding up their units, not by playing a traced step; "
            "`memadvisor run --plan` does not make pipelines."
        )
    yield "Tensor, context and expert parallelism need a described model: `memadvisor estimate --model`."
    if is_host(cluster.accelerator):
        yield f"The {cluster.per_node} ranks share one machine; each is taken to have as many cores as the recorded one."
    own = own_checkpoints(run.rank(step.rank))
    if own is not None:
        yield f"The script itself recomputes, {format_seconds(own.again_s)} of the recorded step; that stays."
    if step.num_micro_batches > 1:
        yield (
            f"Recorded with {step.num_micro_batches} micro-batches a step; layouts with fewer may hold less than predicted."
        )
