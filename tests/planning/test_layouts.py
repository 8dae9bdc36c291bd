from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.errors import UsageError
from memadvisor.layout import Layout
from memadvisor.planning.layout_space import LayoutQuestion, all_layouts, splits
from memadvisor.planning.layouts import search_layouts
from memadvisor.planning.priced_layouts import Priced, are_close, simplicity, split_of, told_apart
from tests.planning.small_spaces import ZEROPP, make_cluster, make_model, questions


def walked(question):
    """Every safe layout, fastest first, and the number of all."""
    found, number = [], 0
    for layout in all_layouts(question):
        number += 1
        try:
            estimate = estimate_step(question.model, question.step(layout), question.cluster)
        except UsageError:
            continue
        if estimate.p_oom < question.max_p_oom:
            found.append(Priced(layout=layout, estimate=estimate))
    return sorted(found, key=lambda one: (one.estimate.step_time_s, simplicity(one.layout))), number


def front_of(found, slowdown):
    """Layouts with less memory than all that are as fast."""
    kept = []
    order = sorted(
        found,
        key=lambda one: (one.estimate.step_time_s, one.estimate.peak_memory_bytes, simplicity(one.layout)),
    )
    for one in order:
        if one.estimate.step_time_s > slowdown * found[0].estimate.step_time_s:
            break
        if not kept or one.estimate.peak_memory_bytes < kept[-1].estimate.peak_memory_bytes:
            kept.append(one)
    return [one.layout for one in kept]


def without_near_equals(candidates):
    kept = []
    for one in candidates:

        def same(other, one=one):
            def kind(each):
                stage = {0: "none", 1: "states", 2: "states", 3: "parameters"}[each.layout.zero_stage]
                return (
                    each.layout.tensor,
                    each.layout.pipeline,
                    stage,
                    each.layout.recompute,
                    each.layout.is_lossy,
                )

            a, b = one.estimate, other.estimate
            slower = abs(a.step_time_s / b.step_time_s - 1)
            ratio = max(a.peak_memory_bytes / b.peak_memory_bytes, b.peak_memory_bytes / a.peak_memory_bytes)
            return kind(one) == kind(other) and slower < 0.02 and ratio < 1.02

        if not any(same(other) for other in kept):
            kept.append(one)
    return [one.layout for one in kept]


@settings(max_examples=12, deadline=None)
@given(questions(), st.sampled_from([1, 3]), st.sampled_from([1.0, 2.0, 10.0]))
@example(ZEROPP, 3, 2.0)
def test_the_search_finds_what_walking_through_all_layouts_finds(question, num_best, slowdown):
    found, number = walked(question)
    searched = search_layouts(question, num_best, slowdown)
    first_of_split = {}
    for one in found:
        first_of_split.setdefault(split_of(one.layout), one)
    assert [one.layout for one in searched.best] == without_near_equals(first_of_split.values())[:num_best]
    assert [one.layout for one in searched.front] == (front_of(found, slowdown) if found else [])
    counts = searched.counts
    assert counts.num_layouts == number
    left_out = counts.num_too_slow + counts.num_too_large + counts.num_failed
    assert counts.num_estimated + left_out == number


def priced(layout, step_time_s, peak_bytes):
    question = LayoutQuestion(model=make_model(), cluster=make_cluster(), seq_len=512, batch_sequences=4)
    any_layout = next(all_layouts(question))
    estimate = estimate_step(question.model, question.step(any_layout), question.cluster)
    worst = replace(
        estimate.worst, parameter_bytes=peak_bytes, gradient_bytes=0.0, optimizer_bytes=0.0, activation_bytes=0.0,
        head_bytes=0.0, buffer_bytes=0.0, allocator_bytes=0.0,
    )  # fmt: skip
    return Priced(layout=layout, estimate=replace(estimate, step_time_s=step_time_s, worst=worst))


def test_layouts_are_close_where_details_and_less_than_2_percent_differ():
    one = priced(Layout(data=4, zero_stage=1), 1.0, 1e9)
    assert are_close(one, priced(Layout(data=2, context=2, zero_stage=2), 1.019, 1e9))
    assert not are_close(one, priced(Layout(data=2, context=2, zero_stage=1), 1.021, 1e9))
    assert not are_close(one, priced(Layout(data=2, context=2, zero_stage=1), 1.0, 0.97e9))
    assert not are_close(one, priced(Layout(data=4, zero_stage=3), 1.0, 1e9))
    assert not are_close(one, priced(Layout(data=4), 1.0, 1e9))
    assert not are_close(one, priced(Layout(data=4, zero_stage=1, recompute="full"), 1.0, 1e9))
    assert not are_close(one, priced(Layout(data=2, tensor=2, zero_stage=1), 1.0, 1e9))
    assert not are_close(one, priced(Layout(data=2, pipeline=2, zero_stage=1), 1.0, 1e9))


def test_of_near_equals_the_first_is_listed():
    layouts = [
        priced(Layout(data=4), 1.0, 1e9),
        priced(Layout(data=2, context=2), 1.0, 1e9),
        priced(Layout(data=2, pipeline=2), 1.01, 1e9),
        priced(Layout(context=4), 1.03, 1e9),
    ]
    assert told_apart(layouts, 5) == (layouts[0], layouts[2], layouts[3])
    assert told_apart(layouts, 2) == (layouts[0], layouts[2])


def test_most_layouts_of_a_larger_space_are_never_estimated():
    question = LayoutQuestion(
        model=make_model(8), cluster=make_cluster(8, 4, 24e9), seq_len=2048, batch_sequences=64
    )
    counts = search_layouts(question).counts
    assert counts.num_layouts > 20_000
    assert counts.num_estimated < counts.num_layouts / 20


@settings(max_examples=8, deadline=None)
@given(questions())
def test_where_no_layout_is_safe_the_smallest_of_all_is_named(question):
    anything = replace(question, max_p_oom=1.0)
    tiny = replace(question.cluster.accelerator, memory_bytes=int(1.2e9))
    tight = replace(question, cluster=replace(question.cluster, accelerator=tiny))
    found, _ = walked(
        replace(anything, cluster=replace(question.cluster, accelerator=replace(tiny, memory_bytes=2**60)))
    )
    searched = search_layouts(tight)
    assert searched.best == () and searched.front == ()

    def size(one):
        return one.estimate.peak_memory_bytes, one.estimate.step_time_s, simplicity(one.layout)

    assert searched.smallest.layout == min(found, key=size).layout


def test_ranks_that_share_a_sequence_have_128_tokens_of_it_or_more():
    question = LayoutQuestion(model=make_model(), cluster=make_cluster(8, 4), seq_len=512, batch_sequences=1)
    assert {layout.context for layout in all_layouts(replace(question, schedules=("1f1b",)))} <= {1, 2, 4}


def test_tensor_parallel_ranks_part_the_heads_that_a_model_has():
    """Of attention, of a recurrence, or of both."""
    question = LayoutQuestion(
        model=make_model(4), cluster=make_cluster(4), seq_len=512, batch_sequences=4, recompute=("none",)
    )
    mixer = make_model(4, pattern="R").recurrence

    def widths(pattern, n_heads, mixer_heads):
        model = replace(
            question.model,
            layer_pattern=pattern,
            n_heads=n_heads,
            recurrence=replace(mixer, n_heads=mixer_heads),
        )
        return {split.tensor for split in splits(replace(question, model=model))}

    assert widths("a", 2, 1) == {1, 2}
    assert widths("R", 1, 4) == {1, 2, 4}
    assert widths("ra", 4, 2) == {1, 2}
