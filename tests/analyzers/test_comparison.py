import dataclasses
import io

import pytest
from rich.console import Console

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.analyzers.communication import communication
from memadvisor.analyzers.comparison import Compared
from memadvisor.analyzers.residuals import comparable, measured_components
from memadvisor.analyzers.step_time import UnitTime, step_time
from memadvisor.cli.summary import prediction
from memadvisor.plan import Plan, Prediction
from memadvisor.report.page import render
from tests.make_run import make_run

PREDICTION = Prediction(
    peak_bytes=5_000_000,
    step_time_s=0.0816,
    by_category_bytes={"parameter": 851_968, "gradient": 0, "activation": 1_000_000},
    exposed_communication_s=0.0,
    peak_position="backward of head",
)
PLAN = Plan(num_ranks=2, zero_stage=0, prediction=PREDICTION, budget_bytes=4_500_000, why="a test")


def test_errors_are_relative_to_what_was_measured():
    """5 000 000 predicted against 4 052 872 measured; 81.6 ms against 102 ms, which is 20 % low."""
    compared = analyze(make_run(plan=PLAN)).comparison

    assert compared.peak_bytes.error_fraction == pytest.approx(5_000_000 / 4_052_872 - 1)
    assert compared.step_time_s.error_fraction == pytest.approx(-0.2)
    assert compared.peak_position == ("backward of head", "backward of blocks.2")


def test_a_category_that_was_not_predicted_has_no_error():
    by_category = analyze(make_run(plan=PLAN)).comparison.by_category_bytes

    assert by_category["parameter"].error_fraction == 0
    assert by_category["other"].predicted is None
    assert by_category["other"].error_fraction is None
    assert by_category["unexplained"].measured == 4096


def test_measured_categories_sum_to_the_measured_peak():
    compared = analyze(make_run(plan=PLAN)).comparison

    measured = sum(pair.measured for pair in compared.by_category_bytes.values())
    assert measured == compared.peak_bytes.measured


@pytest.mark.parametrize(("budget_bytes", "within"), [(4_052_872, True), (4_052_871, False), (None, None)])
def test_the_budget_is_held_or_not(budget_bytes, within):
    plan = dataclasses.replace(PLAN, budget_bytes=budget_bytes)

    assert analyze(make_run(plan=plan)).comparison.within_budget is within


def test_the_largest_rank_and_the_slowest_count():
    run = make_run(plan=PLAN)
    first, second = run.ranks
    steps = tuple(
        dataclasses.replace(step, peak_allocated_bytes=9_000_000, end_s=step.end_s + 1.0)
        if step.traced
        else dataclasses.replace(step, end_s=step.end_s + 1.0)
        for step in second.steps
    )
    compared = analyze(
        dataclasses.replace(run, ranks=(first, dataclasses.replace(second, steps=steps)))
    ).comparison

    assert compared.peak_bytes.measured == 9_000_000
    assert compared.step_time_s.measured == pytest.approx(1.102)
    assert compared.within_budget is False


def test_a_run_without_a_traced_step_compares_time_alone():
    compared = analyze(make_run(plan=PLAN, traced_step=None)).comparison

    assert compared.peak_bytes.measured is None
    assert compared.peak_bytes.error_fraction is None
    assert compared.step_time_s.error_fraction == pytest.approx(-0.2)


def test_a_plan_that_predicts_nothing_is_not_compared():
    assert analyze(make_run(plan=dataclasses.replace(PLAN, prediction=None))).comparison is None
    assert analyze(make_run()).comparison is None


def test_a_reservation_that_was_predicted_and_measured_is_what_the_budget_holds():
    """Within the budget by its peak, but 4.6 MB reserved of 4.5."""
    plan = dataclasses.replace(PLAN, prediction=dataclasses.replace(PREDICTION, reserved_bytes=4_140_000))
    run = make_run(plan=plan)
    ranks = tuple(
        dataclasses.replace(
            rank,
            steps=tuple(
                dataclasses.replace(step, peak_reserved_bytes=4_600_000) if step.traced else step
                for step in rank.steps
            ),
        )
        for rank in run.ranks
    )
    compared = analyze(dataclasses.replace(run, ranks=ranks)).comparison

    assert compared.reserved_bytes.error_fraction == pytest.approx(-0.1)
    assert compared.within_budget is False
    assert analyze(run).comparison.within_budget is True  # on a device without one the peak counts


def test_measured_parts_of_a_step_sum_to_it_and_stand_beside_those_predicted():
    """What overlap slows, and what other tiers hold up, a run does not tell from compute."""
    parts = {"compute": 0.05, "overlap_slowdown": 0.01, "exposed_transfer": 0.002, "optimizer": 0.0196}
    plan = dataclasses.replace(PLAN, prediction=dataclasses.replace(PREDICTION, components_s=parts))
    compared = analyze(make_run(plan=plan)).comparison

    assert sum(pair.measured or 0.0 for pair in compared.components_s.values()) == pytest.approx(0.102)
    assert compared.components_s["compute"].predicted == pytest.approx(0.062)
    assert compared.components_s["optimizer"].measured > 0


def test_second_forwards_of_the_scripts_own_checkpoints_are_compute():
    """They were in the run that the plan was worked out from; only what the plan recomputes is beside it."""
    rank = make_run().ranks[0]
    time = dataclasses.replace(
        step_time(rank),
        units=tuple(
            UnitTime(unit=name, forward_s=0.001, backward_s=0.002, recompute_s=0.001) for name in ("a", "b")
        ),
    )
    planned, plain = (measured_components(time, None, recomputed) for recomputed in (("a",), ()))

    assert (planned["recomputation"], plain["recomputation"]) == (0.001, 0)
    assert plain["compute"] - planned["compute"] == pytest.approx(0.001)


def test_communication_that_is_exposed_in_the_optimizer_counts_once():
    """What ranks agreed on before an update was in the optimizer's time and in that of communication, and compute too short."""
    rank = make_run().ranks[0]
    time = step_time(rank)
    traffic = dataclasses.replace(communication(rank, {}), exposed_fraction=0.05, update_fraction=0.02)
    measured = measured_components(time, traffic, ())

    assert measured["optimizer"] == pytest.approx(time.by_phase_s["optimizer"] - 0.02 * time.median_s)
    assert sum(measured.values()) == pytest.approx(time.median_s)


def test_what_parts_of_units_take_again_is_in_compute_on_both_sides():
    time = step_time(make_run().ranks[0])
    measured = measured_components(time, None, ("a",), has_parts=True)
    predicted = {"compute": 0.1, "recomputation": 0.02, "optimizer": 0.01}

    assert measured["recomputation"] is None  # nothing tells it from the backward around it
    assert measured["compute"] + measured["optimizer"] == pytest.approx(time.median_s)
    assert comparable(predicted, has_parts=True) == pytest.approx({"compute": 0.12, "optimizer": 0.01})
    assert comparable(predicted) == pytest.approx(predicted)


def test_a_plan_that_does_not_say_its_parts_has_none_compared():
    assert analyze(make_run(plan=PLAN)).comparison.components_s == {}


SIZE = "The plan is for micro-batches of 4 samples, and the traced step had 16: set 4 in the script."
NUMBER = (
    "have 8 micro-batches, and the traced one had 2 micro-batches: let the script accumulate gradients over 8, or step "
    "times are of different steps."
)


@pytest.mark.parametrize(
    ("size", "number", "words"),
    [
        (4, 2, SIZE),
        (4, None, SIZE),
        (1, None, SIZE.replace("4 samples", "1 sample").replace("set 4", "set 1")),
        (16, 2, None),
        (None, None, None),
        (4, 8, f"{SIZE} Its steps {NUMBER}"),
        (16, 8, f"The plan's steps {NUMBER}"),
        (None, 8, f"The plan's steps {NUMBER}"),
    ],
)
def test_a_step_of_other_micro_batches_than_the_plans_is_named(size, number, words):
    run = make_run(plan=dataclasses.replace(PLAN, micro_batch_size=size, grad_accum=number))
    ranks = tuple(
        dataclasses.replace(
            rank,
            steps=tuple(dataclasses.replace(s, num_samples=32, num_micro_batches=2) for s in rank.steps),
        )
        for rank in run.ranks
    )
    analysis = analyze(dataclasses.replace(run, ranks=ranks))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(prediction(analysis))

    assert analysis.comparison.other_micro_batch == words
    assert words is None or words in " ".join(console.export_text().split())


@pytest.mark.parametrize("num_steps", [2, 3])
def test_a_warm_up_step_is_not_taken_for_the_step_that_was_predicted(num_steps):
    """Two steps are warm-up; the third is the first steady one."""
    run = make_run(plan=PLAN, traced_step=None)
    ranks = tuple(dataclasses.replace(rank, steps=rank.steps[:num_steps]) for rank in run.ranks)
    analysis = analyze(dataclasses.replace(run, ranks=ranks))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(prediction(analysis))
    said = " ".join(console.export_text().split())
    words = "predicted of a steady step, and measured of step 1, a warm-up step: no step was steady."

    assert (words in said) == (num_steps == 2)
    assert (words in render(analysis)) == (num_steps == 2)
    found = analysis_to_json(analysis)
    assert found["prediction"]["step_time_is_steady"] == (num_steps == 3)
    assert found["ranks"][0]["step_time_is_steady"] == (num_steps == 3)


def compared_speeds(compute_s, optimizer_s):
    """A prediction of 100 ms of compute and 10 ms of the optimizer beside these."""
    found = analyze(make_run(plan=PLAN)).comparison
    parts = {
        "compute": Compared(predicted=0.1, measured=compute_s),
        "recomputation": Compared(predicted=None, measured=0.0),
        "optimizer": Compared(predicted=0.01, measured=optimizer_s),
    }
    return dataclasses.replace(found, components_s=parts)


def test_where_all_that_the_plan_leaves_alone_was_slower_the_machine_is_named():
    """An error of the step time of -77 % stood there alone, and the plan's own part of it was right."""
    slower, faster = compared_speeds(0.42, 0.058), compared_speeds(0.05, 0.005)

    assert "Compute took 4.2 times as long as predicted, and the optimizer 5.8" in slower.other_speed
    assert "slower or busier" in slower.other_speed and slower.other_speed in slower.remarks
    assert "faster or less busy" in faster.other_speed


@pytest.mark.parametrize(
    ("compute_s", "optimizer_s"), [(0.42, 0.01), (0.42, 0.005), (0.11, 0.011), (0.42, None)]
)
def test_one_part_that_was_slower_is_no_matter_of_the_machine(compute_s, optimizer_s):
    assert compared_speeds(compute_s, optimizer_s).other_speed is None


def compared_waits(measured_s, late_s):
    """A prediction of 5 ms of exposed communication, in a step of 102 ms, beside these."""
    parts = {"exposed_communication": Compared(predicted=0.005, measured=measured_s)}
    return dataclasses.replace(analyze(make_run(plan=PLAN)).comparison, components_s=parts, late_s=late_s)


def test_where_ranks_waited_for_each_other_the_exposed_communication_says_so():
    """An error of it of -90 % stood there alone, and messages took what they were predicted to."""
    found = compared_waits(0.03, 0.024)

    assert "24.0 ms waited for a rank that came later, and 6.00 ms were messages" in found.late_ranks
    assert found.late_ranks in found.remarks


@pytest.mark.parametrize(
    ("measured_s", "late_s"), [(0.03, 0.014), (0.004, 0.004), (0.03, None), (None, None), (0.0, 0.0)]
)
def test_waiting_that_is_little_of_it_or_as_predicted_is_not_named(measured_s, late_s):
    assert compared_waits(measured_s, late_s).late_ranks is None


def test_parts_of_the_peak_stand_below_it_and_not_below_the_step_time():
    run = make_run(
        plan=dataclasses.replace(
            PLAN, prediction=dataclasses.replace(PREDICTION, components_s={"compute": 0.1})
        )
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(prediction(analyze(run)))
    names = [
        line.split("  ")[0].strip() or line.split("  ")[1].strip()
        for line in console.export_text().splitlines()
    ]

    assert names.index("peak") < names.index("parameter") < names.index("step time") < names.index("compute")
