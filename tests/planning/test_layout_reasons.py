import dataclasses

from hypothesis import example, given, settings

from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.layout import Layout
from memadvisor.planning.layout_reasons import Neighbour, Reason, explain, reason_words
from memadvisor.planning.layout_space import LayoutQuestion, all_layouts
from memadvisor.planning.layouts import search_layouts
from memadvisor.planning.priced_layouts import Priced
from memadvisor.software_traits import Software
from tests.planning.small_spaces import ZEROPP, make_cluster, make_model, questions


@settings(max_examples=15, deadline=None)
@given(questions())
@example(ZEROPP)
def test_neighbours_are_in_the_space_and_none_that_is_safe_beats_the_best(question):
    found = search_layouts(question)
    if not found.best:
        return
    best = found.best[0]
    space = set(all_layouts(question))
    reason = explain(question, best)
    for one in reason.neighbours:
        assert one.layout in space and one.layout != best.layout
        assert not one.is_safe or one.step_time_ratio >= 1
    assert 0 <= sum(reason.spent.values()) <= 1


def explained(memory_bytes, **layout):
    question = LayoutQuestion(
        model=make_model(8), cluster=make_cluster(4, 1, memory_bytes), seq_len=512, batch_sequences=16
    )
    chosen = Layout(**layout)
    estimate = estimate_step(question.model, question.step(chosen), question.cluster)
    return explain(question, Priced(layout=chosen, estimate=estimate)), estimate


def test_each_degree_is_lowered_and_replicas_make_up_for_it():
    reason, estimate = explained(
        80e9, data=1, tensor=2, pipeline=2, num_microbatches=16, sequence_parallel=True, recompute="full"
    )
    changed = {one.change: one.layout for one in reason.neighbours}
    assert set(changed) == {"tp 1", "pp 1", "pointwise recomputation"}
    assert (changed["tp 1"].data, changed["tp 1"].pipeline, changed["tp 1"].num_microbatches) == (2, 2, 8)
    assert not changed["tp 1"].sequence_parallel
    assert changed["pp 1"].recompute == "full"
    assert reason.spent["pipeline bubble"] == estimate.time_s["pipeline_bubble"] / estimate.step_time_s
    assert reason.spent["recomputation"] == estimate.time_s["recompute"] / estimate.step_time_s


def test_a_microbatch_keeps_its_tokens_where_context_parallelism_is_lowered():
    reason, _ = explained(80e9, data=2, context=2, micro_batch_size=4, num_microbatches=2)
    less = next(one for one in reason.neighbours if one.change == "cp 1")
    assert (less.layout.data, less.layout.micro_batch_size, less.layout.num_microbatches) == (4, 2, 2)


def test_layers_dealt_out_by_their_costs_are_named_where_they_are_faster():
    """Equal stages of a model with a wide head leave the last one the busiest; of one with a narrow head they do not."""
    for vocab, is_faster in ((256_000, True), (1_000, False)):
        question = LayoutQuestion(
            model=dataclasses.replace(make_model(8), vocab=vocab),
            cluster=make_cluster(4, 1, 80e9),
            seq_len=512,
            batch_sequences=64,
            software=Software(stage_rule="even"),
        )
        layout = Layout(data=2, pipeline=2, num_microbatches=32)
        estimate = estimate_step(question.model, question.step(layout), question.cluster)
        reason = explain(question, Priced(layout=layout, estimate=estimate))
        assert ("--split balanced: layers dealt out by their costs (-" in reason_words(reason)) == is_faster
        if is_faster:
            first, last = reason.balanced.layout.stage_layers
            assert first > last and reason.balanced.is_safe and reason.balanced.step_time_ratio < 1


def test_plain_data_parallelism_is_no_reason_for_itself():
    reason, _ = explained(80e9, data=4, num_microbatches=4)
    assert reason.plain is None
    assert [one.change for one in reason.neighbours] == ["tp 2", "pp 2"]


def test_plain_data_parallelism_has_its_fastest_microbatch_that_is_safe():
    """One sequence at a time is no measure of it where more have room."""
    reason, estimate = explained(80e9, data=2, tensor=2, num_microbatches=8)
    plain = reason.plain
    assert plain.layout.data == 4 and plain.layout.micro_batch_size > 1 and plain.is_safe
    assert plain.step_time_s < 1.2 * estimate.step_time_s


def test_the_words_say_what_is_too_large_slower_as_fast_and_faster():
    reason, _ = explained(80e9, data=4, num_microbatches=4)
    one = reason.neighbours[0]

    def neighbour(change: str, total_bytes: float, is_safe: bool, ratio: float) -> Neighbour:
        return dataclasses.replace(
            one, change=change, total_bytes=total_bytes, p_oom=0.3, is_safe=is_safe, step_time_ratio=ratio
        )

    gib = 2**30
    reason = Reason(
        spent={"exposed collectives": 0.12, "pipeline bubble": 0.001, "recomputation": 0.2},
        memory_bytes=80 * gib,
        plain=neighbour("plain dp 4", 200 * gib, False, 0.5),
        balanced=neighbour("layers dealt out by their costs", 40 * gib, True, 0.97),
        neighbours=(
            neighbour("tp 2", 100 * gib, False, 0.9),
            neighbour("pp 2", 79 * gib, False, 0.9),
            neighbour("tp 8", 40 * gib, True, 1.05),
            neighbour("cp 1", 40 * gib, True, 1.001),
            neighbour("ZeRO 0", 40 * gib, True, 0.9),
        ),
    )
    assert reason_words(reason) == (
        "Of the step: 12% exposed collectives, 20% recomputation. Plain dp 4 needs 200 GiB of 80.0 GiB."
        " --split balanced: layers dealt out by their costs (-3.0%)."
        " Too large for 80.0 GiB with: tp 2 (100 GiB), pp 2 (79.0 GiB, p(OOM) 30%). Slower with: tp 8 (+5.0%)."
        " As fast with: cp 1. Faster with: ZeRO 0 (-10.0%)."
    )
