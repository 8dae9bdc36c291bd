"""Which recorded pipelines a plan is made for, and which backward is whose."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.captured_pipeline import captured_pipelines
from memadvisor.analyzers.pipeline_passes import with_micro_batches_apart, with_passes_apart
from memadvisor.analyzers.segments import captured_step
from memadvisor.errors import UsageError
from memadvisor.run.parallel_records import PipelineStage
from memadvisor.run.records import Span
from tests.make_run import make_run


def stage(index, **changes):
    usual = PipelineStage(
        model="",
        index=index,
        num_stages=2,
        position=index,
        num_ranks=2,
        schedule="Schedule1F1B",
        num_micro_batches=2,
        splits_backward=False,
    )
    return replace(usual, **changes)


def a_run(change=lambda index: stage(index), **settings):
    run = make_run(**{"num_ranks": 2, "num_micro_batches": 2, **settings})
    ranks = tuple(
        replace(rank, pipeline_stages=tuple(filter(None, [change(number)])))
        for number, rank in enumerate(run.ranks)
    )
    return replace(run, ranks=ranks)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (a_run(lambda index: stage(index, splits_backward=True)), "gradients of inputs and of weights in two passes"),
        (a_run(lambda index: stage(index, num_ranks=1)), "2 stages on 2 ranks were recorded"),
        (a_run(lambda index: stage(0)), "2 stages on 2 ranks were recorded"),
        (a_run(lambda index: stage(0) if index == 0 else None), "stages on rank 1"),
        (a_run(missing_ranks=(1,)), "stages on rank 1"),
        (a_run(lambda index: stage(index, num_micro_batches=1)), "ran 2 forwards and 2 backwards"),
        (a_run(lambda index: stage(index, schedule=f"Mine{index}")), "Mine0 and Mine1"),
        (a_run(traced_step=None), "No step of rank 0 was traced"),
    ],
)  # fmt: skip
def test_pipelines_that_no_plan_is_made_for_are_refused_in_a_line(run, words):
    with pytest.raises(UsageError, match=words):
        captured_pipelines(run)


def test_a_step_without_the_scripts_evaluation_is_named():
    """The traced one has two forwards more, of the schedule's `eval`; a later one has not."""
    run = a_run(num_steps=5)
    traced = run.ranks[0].traced_step.index
    later = traced + 1
    whole = [span for span in run.ranks[0].spans if span.step == traced]
    assert later in {step.index for step in run.ranks[0].steps}
    evaluated = [Span(traced, "forward", "", 0, 1000.0 + n, 1000.5 + n) for n in range(2)]
    ranks = tuple(
        replace(rank, spans=(*whole, *evaluated, *(replace(span, step=later) for span in whole)))
        for rank in run.ranks
    )

    with pytest.raises(UsageError, match="ran 4 forwards and 2 backwards") as refused:
        captured_pipelines(replace(run, ranks=ranks))

    assert f"--trace-step {later}" in refused.value.hint


def test_a_rank_of_a_pipeline_does_not_stand_for_all_ranks():
    with pytest.raises(UsageError, match="holds stages of a pipeline"):
        captured_step(a_run())


def test_the_nth_backward_of_a_stage_is_that_of_its_nth_forward():
    """Two forwards before the first backward, of each of two stages that a rank holds."""
    rows = [("forward", ""), ("forward", ""), ("forward", "model1"), ("backward", "model1"), ("backward", "")]
    spans = []
    for second, (kind, model) in enumerate(rows):
        unit = f"{model}.a" if model else "a"
        spans.append(Span(0, kind, model if kind == "forward" else "", 0, second, second + 0.9))
        spans.append(Span(0, f"unit_{kind}", unit, 0, second + 0.1, second + 0.8))
    stages = (stage(0), stage(1, model="model1", position=0))
    rank = replace(make_run(num_ranks=1).ranks[0], spans=tuple(spans), pipeline_stages=stages)

    apart, in_words = (
        [span.micro_batch for span in same(rank).spans]
        for same in (with_passes_apart, with_micro_batches_apart)
    )

    assert apart == [0, 0, 1, 1, 2, 2, 2, 2, 0, 0]
    assert in_words == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
