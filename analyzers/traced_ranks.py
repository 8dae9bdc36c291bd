"""The ranks of a run whose step was traced, and the one of them that plans are worked out for."""

from __future__ import annotations

from memadvisor.analyzers.data_ranks import num_splitting
from memadvisor.analyzers.out_of_memory import way_on
from memadvisor.errors import UsageError
from memadvisor.run.records import Step
from memadvisor.run.run import RankRun, Run


def traced_ranks(run: Run, of_rank: int | None) -> tuple[list[RankRun], RankRun, Step]:
    """The ranks whose step was traced, of them the one whose peak is highest, and that step."""
    if run.plan is not None:
        raise UsageError(
            "This run was made with a plan applied, and a plan is worked out from a plain run.",
            hint="profile the script without a plan, and advise on that run.",
        )
    named = [rank for rank in run.ranks if of_rank in (None, rank.process.rank)]
    traced = [rank for rank in named if rank.traced_step is not None and rank.storages]
    if not traced:
        way = way_on(run)
        if way is not None:
            raise UsageError("This run ran out of memory before a step of it was traced.", hint=way)
        if not any(rank.steps for rank in named):
            raise UsageError(
                "No training step was seen in this run, so nothing is known of its memory.",
                hint="`memadvisor show` says what was seen of it.",
            )
        if any(rank.has_lost_trace for rank in named):
            raise UsageError(
                "The traced step's record is lost, so nothing is known of this run's memory.",
                hint="`memadvisor show` says what of the run is damaged; profile the script again.",
            )
        other = next((f"; or with {rank.trace_option}" for rank in named if rank.trace_option), "")
        raise UsageError(
            "No step of this run was traced, so nothing is known of its memory.",
            hint=f"profile it for more steps: the traced one comes after the warm-up{other}.",
        )
    rank = max(traced, key=traced_peak_bytes)
    if rank.pipeline_stages and of_rank is None:
        raise UsageError(
            "Each rank of this run holds stages of a pipeline, and what is asked for is worked out for ranks that have the "
            "same model.",
            hint="`memadvisor advise RUN --memory SIZE` makes plans for pipelines.",
        )
    if rank.tensor_parallel and (of_rank is None or rank.pipeline_stages):
        raise UsageError(
            f"{num_splitting(rank)} ranks of this run split the layers of a model, and what is asked for is worked out for ranks that have all of it.",
            hint="`memadvisor advise RUN --memory SIZE` makes plans for them; `memadvisor estimate` predicts layouts with "
            "tensor parallelism.",
        )
    step = rank.traced_step
    if step is None:
        raise AssertionError("a traced rank has a traced step")
    return traced, rank, step


def traced_peak_bytes(rank: RankRun) -> int:
    step = rank.traced_step
    return (step.peak_allocated_bytes if step is not None else None) or 0
