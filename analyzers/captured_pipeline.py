"""The traced step of pipelines, of all their ranks: each one's own step, its order of work, and what the links take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from memadvisor.analyzers.matching import match_collectives
from memadvisor.analyzers.pipeline_passes import with_passes_apart
from memadvisor.analyzers.segments import captured_step
from memadvisor.analyzers.sides import SEND_RECV
from memadvisor.cost.pipelines.captured import CapturedPipeline
from memadvisor.cost.pipelines.work import Kind, Work
from memadvisor.cost.step import CapturedStep, Segment
from memadvisor.errors import UsageError
from memadvisor.run.parallel_records import PipelineStage
from memadvisor.run.records import Span
from memadvisor.run.run import RankRun, Run
from memadvisor.units import counted

# Between two pieces this schedule waits for what it sends, too; others wait for that at the end.
_WAITS_FOR_SENDS = ("Schedule1F1B",)
_FIRST = 0  # This step learns shapes and makes optimizer state.
_KINDS = {"forward": Kind.F, "backward": Kind.BW}


def is_pipeline(run: Run) -> bool:
    """Whether a rank holds a stage of a `torch.distributed.pipelining` schedule."""
    return any(rank.pipeline_stages for rank in run.ranks)


def captured_pipelines(run: Run) -> tuple[CapturedPipeline, ...]:
    """Of a script with several pipelines beside each other, whose stages average their gradients, each one. Raises UsageError
    for pipelines that no plan is made for, in one line."""
    beside = _beside(run)
    step_time_s = 0.0
    found = []
    for ranks in beside:
        found.append(_captured(run, ranks))
        step_time_s = max(step_time_s, found[-1].step_time_s)
    return tuple(replace(pipeline, step_time_s=step_time_s) for pipeline in found)  # they wait for each other


def _captured(run: Run, ranks: Sequence[RankRun]) -> CapturedPipeline:
    first = ranks[0].pipeline_stages[0]
    steps = tuple(captured_step(run, num_ranks=1, of_rank=rank.process.rank) for rank in ranks)
    stages = tuple(tuple(stage.index for stage in rank.pipeline_stages) for rank in ranks)
    works: list[tuple[Work, ...]] = []
    seconds: dict[Work, float] = {}
    for step, own in zip(steps, stages, strict=True):
        of_rank = dict(_timed(step, own, first))
        works.append(tuple(of_rank))
        seconds |= of_rank
    return CapturedPipeline(
        schedule=first.schedule,
        num_stages=first.num_stages,
        num_micro_batches=first.num_micro_batches,
        steps=steps,
        stages=stages,
        works=tuple(works),
        seconds=seconds,
        link_s=_links(ranks),
        is_blocking=first.schedule in _WAITS_FOR_SENDS,
        step_time_s=max(step.step_time_s for step in steps),
    )


def _beside(run: Run) -> list[list[RankRun]]:
    """The ranks of each pipeline, in its order."""
    lost = [*run.missing_ranks, *(r.process.rank for r in run.ranks if not r.pipeline_stages)]
    hint = (
        "profile a script all of whose ranks are the stages of one pipeline, or of several beside each other."
    )
    if lost:
        raise UsageError(f"Nothing is known of the pipeline's stages on rank {min(lost)}.", hint=hint)
    pipelines: dict[int | None, list[RankRun]] = defaultdict(list)
    for rank in run.ranks:
        pipelines[rank.pipeline_stages[0].first_rank].append(rank)
    beside = [
        sorted(ranks, key=lambda rank: rank.pipeline_stages[0].position) for ranks in pipelines.values()
    ]
    _check_stages(beside, hint)
    for rank in run.ranks:
        _check_passes(rank)
    return beside


def _check_stages(beside: Sequence[Sequence[RankRun]], hint: str) -> None:
    """Each pipeline must be whole, and all of them alike."""
    shapes = set()
    for ranks in beside:
        found = [stage for rank in ranks for stage in rank.pipeline_stages]
        shapes |= {(stage.num_stages, stage.num_micro_batches) for stage in found}
        names = sorted({stage.schedule for stage in found})
        if {stage.num_ranks for stage in found} != {len(ranks)} or sorted(
            stage.index for stage in found
        ) != list(range(found[0].num_stages)):
            raise UsageError(
                f"Of the script's pipeline of {found[0].num_stages} stages on {found[0].num_ranks} ranks, {len(found)} "
                f"stages on {len(ranks)} ranks were recorded.",
                hint=hint,
            )
        if len(names) > 1:
            raise UsageError(f"The script's stages run under {' and '.join(names)}.", hint=hint)
        if any(stage.splits_backward for stage in found):
            raise UsageError(
                f"{found[0].schedule} takes gradients of inputs and of weights in two passes, and a unit that is recomputed "
                "between them is not planned.",
                hint="use a schedule that does not split the backward, as Schedule1F1B or ScheduleInterleaved1F1B.",
            )
    if len(shapes) > 1:
        raise UsageError("Pipelines beside each other have other stages or micro-batches.", hint=hint)


def _check_passes(rank: RankRun) -> None:
    """Each stage must have run its schedule once in the traced step."""
    step = rank.traced_step
    if step is None or not rank.storages:
        raise UsageError(
            f"No step of rank {rank.process.rank} was traced, so nothing is known of its memory.",
            hint="profile the script for more steps: the traced one comes after the warm-up.",
        )
    spans = with_passes_apart(rank).spans
    expected = sum(stage.num_micro_batches for stage in rank.pipeline_stages)
    if not _is_one_pass_each(spans, step.index, expected):
        counts = Counter(span.kind for span in spans if span.step == step.index)
        indices = (other.index for other in rank.steps if other.index > _FIRST)
        others = sorted(indices, key=lambda index: (index < step.index, index))
        whole = next((index for index in others if _is_one_pass_each(spans, index, expected)), None)
        raise UsageError(
            f"Rank {rank.process.rank} ran {counts['forward']} forwards and {counts['backward']} backwards in the traced "
            f"step, and its stages have {counted(expected, 'micro-batch')}.",
            hint="plans are for scripts that run their schedule once between updates."
            if whole is None
            else f"step {whole} ran the schedule once: profile again with --trace-step {whole}.",
        )


def _is_one_pass_each(spans: Iterable[Span], step: int, expected: int) -> bool:
    own = [span for span in spans if span.step == step]
    counts = Counter(span.kind for span in own if span.kind in ("forward", "backward"))
    numbers = {span.micro_batch for span in own if span.kind == "forward"}
    return counts == {"forward": expected, "backward": expected} and numbers == set(range(expected))


def _timed(step: CapturedStep, own: Sequence[int], stage: PipelineStage) -> Iterator[tuple[Work, float]]:
    """The rank's pieces in order. What stands between a forward and its own backward, right behind it, is of that
    backward: the loss, on the last stage."""
    seconds: dict[tuple[str, int], float] = {}
    last: Segment | None = None
    between_s = 0.0
    for segment in step.segments:
        number = segment.micro_batch
        if segment.phase not in _KINDS or number is None:
            between_s += segment.duration_s
            continue
        key = segment.phase, number
        follows = last is not None and (last.phase, last.micro_batch) == ("forward", number)
        if key not in seconds:
            is_of_last = own[number // stage.num_micro_batches] == stage.num_stages - 1
            seconds[key] = between_s if segment.phase == "backward" and follows and is_of_last else 0.0
        seconds[key] += segment.duration_s
        last, between_s = segment, 0.0
    for (phase, number), duration_s in seconds.items():
        place, micro_batch = divmod(number, stage.num_micro_batches)
        yield Work(_KINDS[phase], own[place], micro_batch), duration_s


def _links(ranks: Sequence[RankRun]) -> tuple[float | None, ...]:
    """The quickest message between two ranks in the traced step, once both were at it: an end is seen when somebody waits
    for it, as a rule later."""
    position = {rank.process.rank: rank.pipeline_stages[0].position for rank in ranks}
    taken: dict[frozenset[int], list[float]] = defaultdict(list)
    for (operation, _, _), matched in match_collectives(ranks).items():
        if operation == SEND_RECV and matched.end_s is not None:
            ends = frozenset(position[rank] for rank in matched.issue_s)
            taken[ends].append(max(0.0, matched.end_s - matched.last_start_s))
    num_ranks = len(ranks)
    pairs = [frozenset((rank, (rank + 1) % num_ranks)) for rank in range(num_ranks)]
    return tuple(min(taken[pair]) if taken[pair] else None for pair in pairs)
