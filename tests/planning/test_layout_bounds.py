from hypothesis import given, settings

from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.errors import UsageError
from memadvisor.planning.layout_bounds import LayoutBounds
from memadvisor.planning.layout_space import make_layout, pipelines, splits, states, works
from tests.planning.small_spaces import questions


def layouts_with_bounds(question):
    bounds = LayoutBounds(question)
    for split in splits(question):
        for work in works(question, split):
            count = question.batch_sequences // split.data // work.micro_batch_size
            for schedule, chunks in pipelines(
                question.schedules, question.model.n_layers, split.pipeline, count
            ):
                pipeline_s = None
                for held in states(question, split):
                    layout = make_layout(question, split, work, schedule, chunks, held)
                    try:
                        estimate = estimate_step(question.model, question.step(layout), question.cluster)
                    except UsageError:
                        continue
                    if pipeline_s is None:
                        pipeline_s = bounds.pipeline_seconds(work, split.pipeline, count, schedule, chunks)
                    least_s = bounds.step_seconds(pipeline_s, work, split, schedule, chunks, held)
                    least_bytes = bounds.peak_bytes(work, split, count, schedule, chunks, held)
                    yield layout, estimate, least_s, least_bytes


@settings(max_examples=10, deadline=None)
@given(questions())
def test_no_layout_beats_its_bounds(question):
    safe = LayoutBounds(question).largest_safe_peak_bytes
    for layout, estimate, least_s, least_bytes in layouts_with_bounds(question):
        assert least_s <= estimate.step_time_s, layout
        assert least_bytes <= estimate.peak_memory_bytes, layout
        assert (estimate.p_oom < question.max_p_oom) <= (estimate.peak_memory_bytes <= safe)


@settings(max_examples=5, deadline=None)
@given(questions())
def test_memory_is_known_without_an_estimate_where_there_is_no_pipeline(question):
    for layout, estimate, _, least_bytes in layouts_with_bounds(question):
        if layout.pipeline == 1:
            assert abs(least_bytes / estimate.peak_memory_bytes - 1) < 1e-6
