"""The traced step of a pipeline, of all its ranks: each one's own step, its order of work, and what the links take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from memadvisor.analyzers.matching import match_collectives
from memadvisor.analyzers.pipeline_passes import with_passes_apart
from memadvisor.analyzers.segments import captured_step
from memadvisor.analyzers.sides import SEND_RECV
from memadvisor.cost.pipelines.captured import CapturedPipeline
from memadvisor.cost.pipelines.work import Kind, Work
from memadvisor.cost.step import CapturedStep, Segment
from memadvisor.errors import UsageError
from memadvisor.run.parallel_records import PipelineStage
from memadvisor.run.run import RankRun, Run

# Between two pieces this schedule waits for what it sends, too; others wait for that at the end.
_WAITS_FOR_SENDS = ("Schedule1F1B",)
_KINDS = {"forward": Kind.F, "backward": Kind.BW}


def is_pipeline(run: Run) -> bool:
    """Whether a rank holds a stage of a `torch.distributed.pipelining` schedule."""
    return any(rank.pipeline_stages for rank in run.ranks)


def captured_pipeline(run: Run) -> CapturedPipeline:
    """Raises UsageError for a pipeline that no plan is made for, in one line."""
    _check_stages(run)
    first = run.ranks[0].pipeline_stages[0]
    steps = tuple(captured_step(run, num_ranks=1, of_rank=rank.process.rank) for rank in run.ranks)
    stages = tuple(tuple(stage.index for stage in rank.pipeline_stages) for rank in run.ranks)
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
        link_s=_links(run),
        is_blocking=first.schedule in _WAITS_FOR_SENDS,
        step_time_s=max(step.step_time_s for step in steps),
    )


def _check_stages(run: Run) -> None:
    found = [stage for rank in run.ranks for stage in rank.pipeline_stages]
    indices = sorted(stage.index for stage in found)
    names = {stage.schedule for stage in found}
    hint = "profile a script all of whose ranks are the stages of one pipeline."
    if run.missing_ranks or any(not rank.pipeline_stages for rank in run.ranks):
        lost = run.missing_ranks or [r.process.rank for r in run.ranks if not r.pipeline_stages]
        raise UsageError(f"Nothing is known of the pipeline's stages on rank {lost[0]}.", hint=hint)
    if indices != list(range(found[0].num_stages)) or found[0].num_ranks != run.manifest.world_size:
        raise UsageError(
            f"The script's pipeline of {found[0].num_stages} stages is on {found[0].num_ranks} of "
            f"{run.manifest.world_size} ranks, and plans are worked out for one pipeline over all of them.",
            hint=hint,
        )
    if len(names) > 1:
        raise UsageError(f"The script's stages run under {' and '.join(sorted(names))}.", hint=hint)
    if any(stage.splits_backward for stage in found):
        raise UsageError(
            f"{found[0].schedule} takes gradients of inputs and of weights in two passes, and a unit that is recomputed "
            "between them is not planned.",
            hint="use a schedule that does not split the backward, as Schedule1F1B or ScheduleInterleaved1F1B.",
        )
    for rank in run.ranks:
        _check_passes(rank)


def _check_passes(rank: RankRun) -> None:
    """Each stage must have run its schedule once in the traced step."""
    step = rank.traced_step
    if step is None or not rank.storages:
        raise UsageError(
            f"No step of rank {rank.process.rank} was traced, so nothing is known of its memory.",
            hint="profile the script for more steps: the traced one comes after the warm-up.",
        )
    own = [span for span in with_passes_apart(rank).spans if span.step == step.index]
    counts = Counter(span.kind for span in own if span.kind in ("forward", "backward"))
    numbers = {span.micro_batch for span in own if span.kind == "forward"}
    expected = sum(stage.num_micro_batches for stage in rank.pipeline_stages)
    if counts != {"forward": expected, "backward": expected} or numbers != set(range(expected)):
        raise UsageError(
            f"Rank {rank.process.rank} ran {counts['forward']} forwards and {counts['backward']} backwards in the traced "
            f"step, and its stages have {expected} micro-batches.",
            hint="plans are for scripts that run their schedule once between updates.",
        )


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


def _links(run: Run) -> tuple[float | None, ...]:
    """The quickest message between two ranks in the traced step, once both were at it: an end is seen when somebody waits
    for it, as a rule later."""
    position = {rank.process.rank: rank.pipeline_stages[0].position for rank in run.ranks}
    taken: dict[frozenset[int], list[float]] = defaultdict(list)
    for (operation, _, _), matched in match_collectives(run.ranks).items():
        if operation == SEND_RECV and matched.end_s is not None:
            ranks = frozenset(position[rank] for rank in matched.issue_s)
            taken[ranks].append(max(0.0, matched.end_s - matched.last_start_s))
    num_ranks = len(run.ranks)
    pairs = [frozenset((rank, (rank + 1) % num_ranks)) for rank in range(num_ranks)]
    return tuple(min(taken[pair]) if taken[pair] else None for pair in pairs)
