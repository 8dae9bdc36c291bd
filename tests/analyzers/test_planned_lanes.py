"""Predicted lanes beside measured ones: of which step and which clock each is, and what is not measured."""

import dataclasses
from itertools import pairwise

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.planned_lanes import PREDICTED, planned_lanes
from memadvisor.plan import LaneInterval, Plan, Prediction, RankPlan
from memadvisor.run.transfer_records import Transfer
from tests.make_run import make_run

TIMELINE = (
    LaneInterval("compute", "forward of blocks.0", 0.0, 0.03),
    LaneInterval("compute", "backward of blocks.0", 0.03, 0.08),
    LaneInterval("collective", "reduce blocks.0", 0.05, 0.07),
)
PLAN = Plan(
    num_ranks=2,
    zero_stage=2,
    prediction=Prediction(
        peak_bytes=4_000_000,
        step_time_s=0.08,
        by_category_bytes={},
        exposed_communication_s=0.001,
        peak_position="backward of blocks.0",
        components_s={"compute": 0.079, "exposed_communication": 0.001},
    ),
    timeline=TIMELINE,
)


def lanes_of(run):
    return planned_lanes(analyze(run))


def named(found, lane):
    return {row.basis: row for row in found.rows if row.lane == lane}


def test_the_predicted_lanes_are_the_plans():
    found = lanes_of(make_run(plan=PLAN))

    predicted = [each for row in found.rows if row.is_predicted for each in row.intervals]
    assert predicted == list(TIMELINE)
    assert [row.is_predicted for row in found.rows] == [True, False, False, True, False]


def test_compute_is_of_a_timed_step_and_collectives_of_the_traced_one_beside_its_own_compute():
    """A traced step takes longer: nothing of it stands on the time of another step unsaid."""
    run = make_run(plan=PLAN)
    found = lanes_of(run)
    timed, traced = run.ranks[0].steps[-1], run.ranks[0].traced_step

    assert set(named(found, "compute")) == {PREDICTED, "measured, step 5", "measured, traced step 3"}
    assert set(named(found, "collective")) == {PREDICTED, "measured, traced step 3"}
    assert named(found, "compute")["measured, step 5"].step_s == pytest.approx(timed.duration_s)
    for lane in ("compute", "collective"):
        assert named(found, lane)["measured, traced step 3"].step_s == traced.duration_s


def test_every_moment_of_the_measured_step_is_under_the_innermost_span_it_is_in():
    """Of blocks 8 ms each way and a head of 4, the backward twice as long; the whole is the step."""
    found = lanes_of(make_run(num_ranks=1, plan=dataclasses.replace(PLAN, num_ranks=1, zero_stage=0)))
    row = named(found, "compute")["measured, step 5"]

    assert row.intervals[0].start_s == 0
    assert row.intervals[-1].end_s == pytest.approx(row.step_s)
    assert all(one.end_s == pytest.approx(two.start_s) for one, two in pairwise(row.intervals))
    took_s = {each.label: each.end_s - each.start_s for each in row.intervals}
    assert took_s["forward of blocks.1"] == pytest.approx(0.008)
    assert took_s["optimizer step"] == pytest.approx(0.008)
    assert "work outside forward, backward and optimizer" in took_s


def test_second_forwards_stand_inside_the_backward():
    found = lanes_of(make_run(plan=PLAN, recompute=("blocks.1",)))
    labels = [each.label for each in named(found, "compute")["measured, step 5"].intervals]

    assert labels.index("recomputation of blocks.1") < labels.index("backward of blocks.1")


def test_the_step_is_the_timed_one_nearest_to_the_median():
    run = make_run(plan=PLAN)
    (slow, *_), rest = run.ranks, run.ranks[1:]
    steps = tuple(
        dataclasses.replace(step, end_s=step.end_s + 0.5) if step.index == 5 else step for step in slow.steps
    )
    run = dataclasses.replace(run, ranks=(dataclasses.replace(slow, steps=steps), *rest))

    assert "measured, step 5" not in named(lanes_of(run), "compute")


def test_transfers_are_predicted_and_said_to_be_not_measured():
    timeline = (*TIMELINE, LaneInterval("disk", "prefetch of blocks.0", 0.0, 0.01))
    found = lanes_of(make_run(plan=dataclasses.replace(PLAN, timeline=timeline)))

    row = named(found, "disk")["measured"]
    assert row.intervals is None
    assert row.why == "what the disk transfers is not recorded"


def test_collectives_without_a_traced_step_are_not_measured():
    found = lanes_of(make_run(plan=PLAN, traced_step=None))

    row = named(found, "collective")["measured"]
    assert (row.intervals, row.why) == (None, "no step was traced")
    assert set(named(found, "compute")) == {PREDICTED, "measured, step 2"}


def test_errors_are_of_the_slowest_rank_and_the_comparisons():
    analysis = analyze(make_run(plan=PLAN))
    found = planned_lanes(analysis)

    assert found.step_time_s == analysis.comparison.step_time_s
    assert found.exposed_communication_s.predicted == 0.001
    measured_s = analysis.comparison.components_s["exposed_communication"].measured
    assert found.exposed_communication_s.measured == measured_s


def test_a_step_time_that_runs_have_corrected_is_not_where_the_lanes_end():
    learnt = dataclasses.replace(PLAN.prediction, step_time_s=0.1)

    assert lanes_of(make_run(plan=PLAN)).unlearnt_s is None
    assert lanes_of(make_run(plan=dataclasses.replace(PLAN, prediction=learnt))).unlearnt_s == 0.08


@pytest.mark.parametrize(
    "changes",
    [{"plan": None}, {"plan": dataclasses.replace(PLAN, timeline=None)}, {"plan": PLAN, "num_steps": 0}],
)
def test_without_a_timeline_or_a_step_there_are_none(changes):
    assert lanes_of(make_run(**{"traced_step": None, **changes})) is None


PASSES = tuple(
    LaneInterval("compute", f"{kind} of micro-batch {number}", 0.01 * place, 0.01 * place + 0.005)
    for place, (kind, number) in enumerate([("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)])
)
STAGES = Plan(
    num_ranks=2,
    zero_stage=0,
    prediction=PLAN.prediction,
    ranks=tuple(RankPlan(rank=rank, fingerprint="", units=(), timeline=PASSES) for rank in range(2)),
)


def test_of_a_pipeline_every_rank_has_its_passes_above_those_of_a_step_of_its_own():
    found = lanes_of(make_run(plan=STAGES, num_micro_batches=2))

    assert found.rank is None
    assert [(row.rank, row.is_predicted) for row in found.rows] == [
        (0, True),
        (0, False),
        (1, True),
        (1, False),
    ]
    measured = found.rows[1]
    assert {each.label for each in measured.intervals} == {*(each.label for each in PASSES), "optimizer step"}
    assert all(0 <= each.start_s < each.end_s <= measured.step_s for each in measured.intervals)
    assert found.exposed_communication_s.predicted is None  # of one rank, it says nothing of a pipeline


def test_passes_that_are_not_as_many_as_predicted_have_no_micro_batchs_name():
    found = lanes_of(make_run(plan=STAGES, num_micro_batches=3))

    assert {each.label for each in found.rows[1].intervals} == {
        "forward outside any unit",
        "backward outside any unit",
        "optimizer step",
    }


def test_of_a_rank_whose_record_is_missing_there_is_no_row():
    found = lanes_of(make_run(plan=STAGES, num_micro_batches=2, missing_ranks=(1,)))

    assert {row.rank for row in found.rows} == {0}


def test_transfers_of_the_traced_step_stand_below_the_predicted_ones_beside_its_compute():
    timeline = (*TIMELINE, LaneInterval("disk", "offload of blocks.0", 0.0, 0.01))
    run = make_run(plan=dataclasses.replace(PLAN, timeline=timeline))
    step = run.ranks[0].traced_step
    moved = [
        Transfer(step.index, "disk", kind, 2**20, step.start_s + start_s, step.start_s + start_s + 0.01)
        for kind, start_s in (("write", 0.02), ("read", 0.05))
    ]
    others = Transfer(step.index + 1, "disk", "write", 2**20, step.start_s, step.start_s + 0.01)
    ranks = tuple(dataclasses.replace(rank, transfers=(*moved, others)) for rank in run.ranks)
    found = named(lanes_of(dataclasses.replace(run, ranks=ranks)), "disk")

    assert set(found) == {PREDICTED, f"measured, traced step {step.index}"}
    measured = found[f"measured, traced step {step.index}"]
    assert [each.label for each in measured.intervals] == ["write of 1.00 MiB", "read of 1.00 MiB"]
    assert [each.start_s for each in measured.intervals] == pytest.approx([0.02, 0.05])
    assert measured.step_s == step.duration_s
