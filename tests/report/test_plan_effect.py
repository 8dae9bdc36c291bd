"""What a plan did, beside what was without it."""

import dataclasses

import pytest

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.plan import PlainRun
from memadvisor.report.plan_effect import effect_in_words, plan_card, results_in_words
from tests.analyzers.test_planned_lanes import PLAN
from tests.make_run import make_run

PLAIN = PlainRun(peak_bytes=2 * 4_052_872, step_time_s=0.08, num_ranks=2)


def analysis_of(**changes):
    return analyze(make_run(plan=dataclasses.replace(PLAN, **changes)))


def test_plain_predicted_and_measured_stand_below_each_other_with_what_changed():
    """A peak of 3.87 MiB, half of what it was; a step of 102 ms, 27.5 % longer."""
    card = plan_card(analysis_of(plain=PLAIN))

    without, predicted, measured = card.split("<tr>")[2:]
    assert "without the plan, 2 ranks" in without and "7.73 MiB" in without and "80.0 ms" in without
    assert (
        "kind-predicted" in predicted and "3.81 MiB (-50.7 %)" in predicted and "80.0 ms (0.0 %)" in predicted
    )
    assert "kind-measured" in measured and "3.87 MiB (-50.0 %)" in measured and "102 ms (+27.5 %)" in measured


def test_a_plan_that_does_not_tell_has_no_such_row_and_no_such_sentence():
    analysis = analysis_of()

    assert "without the plan" not in plan_card(analysis).partition("<p")[0]
    assert effect_in_words(analysis.comparison) is None
    assert analysis_to_json(analysis)["prediction"]["plain"] is None


def test_the_same_is_said_in_a_sentence_and_in_json():
    analysis = analysis_of(plain=PLAIN)

    assert effect_in_words(analysis.comparison) == (
        "Without the plan: peak 7.73 MiB, step 80.0 ms, measured on 2 ranks. With it: peak -50.0 %, step +27.5 %."
    )
    assert analysis_to_json(analysis)["prediction"]["plain"] == dataclasses.asdict(PLAIN)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_ranks": 1, "zero_stage": 0}, "bit for bit those without the plan"),
        ({}, "those without the plan, but for the order in which gradients are summed over ranks"),
        ({"fused_updates": True}, "not bit for bit those without the plan"),
        (
            {"micro_batch_size": 2, "plain": dataclasses.replace(PLAIN, micro_batch_size=8)},
            "those of the script with micro-batches of 2: beside those of 8 sums are in another order, and what is worked "
            "out over a whole micro-batch (batch norm, a contrastive loss) sees fewer samples",
        ),
        ({"fused_updates": True, "autocast": "bf16"}, "other than without the plan, which is lossy"),
    ],
)
def test_results_are_told_as_designed_and_as_not_compared(changes, words):
    said = results_in_words(analysis_of(**changes))

    assert said == f"Results are by design {words}; losses are not recorded."


def test_categories_that_are_nothing_on_both_sides_have_no_row():
    found = analysis_of().comparison.shown_by_category_bytes

    assert "weight_copy" not in found and "activation" in found and "unexplained" in found
