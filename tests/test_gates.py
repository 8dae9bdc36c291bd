import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.analysis import analyze
from memadvisor.gates import Figure, Limits, hold, judge
from memadvisor.hardware.hardware import Hardware
from tests.analyzers.test_comparison import PLAN
from tests.make_run import make_run, stopped

PEAK_BYTES = 4_052_872
PROCESSOR = Hardware(
    name="synthetic processor",
    kind="given",
    source="a test",
    memory_bytes=None,
    memory_bandwidth_bytes_per_s=None,
    peak_flops_per_s={"float32": 1e10},
)

VALUES = st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=5)


def gate(limits, run=None, baseline=None, hardware=PROCESSOR):
    """The one gate that the limits ask for."""
    baseline = None if baseline is None else analyze(baseline)
    (found,) = judge(analyze(run or make_run(), hardware), limits, baseline).gates
    return found


@given(st.sampled_from(("max_x", "min_x")), VALUES, st.floats(0, 100))
def test_a_gate_holds_if_every_rank_recorded_a_figure_inside_the_limit(option, values, limit):
    figures = [Figure(rank=rank, value=value, why="unseen") for rank, value in enumerate(values)]
    found = hold(option, "x", "fraction", limit, figures)

    inside = [
        value is not None and (value <= limit if option == "max_x" else value >= limit) for value in values
    ]
    assert found.holds == all(inside)
    assert len(found.unknown) == (None in values)
    if found.measured is not None:
        assert values[found.rank] == found.measured


@given(st.sampled_from(("max_x", "min_x")), VALUES, st.floats(0, 100), st.floats(0, 100))
def test_what_holds_under_a_limit_holds_under_a_looser_one(option, values, one, other):
    figures = [Figure(rank=rank, value=value) for rank, value in enumerate(values)]
    strict, loose = sorted((one, other), reverse=option == "min_x")

    if hold(option, "x", "fraction", strict, figures).holds:
        assert hold(option, "x", "fraction", loose, figures).holds


def test_the_peak_may_be_as_high_as_the_limit():
    assert gate(Limits(max_peak_bytes=PEAK_BYTES)).holds

    broken = gate(Limits(max_peak_bytes=PEAK_BYTES - 1))
    assert not broken.holds
    assert (broken.measured, broken.where) == (PEAK_BYTES, "in backward of blocks.2")


def test_a_higher_peak_in_another_step_counts():
    run = make_run(device="cuda:0", num_ranks=1)
    rank = run.ranks[0]
    steps = (
        dataclasses.replace(rank.steps[0], peak_allocated_bytes=9 * 2**20, peak_reserved_bytes=11 * 2**20),
        *rank.steps[1:],
    )
    run = dataclasses.replace(run, ranks=(dataclasses.replace(rank, steps=steps),))

    found = gate(Limits(max_peak_bytes=8 * 2**20), run)
    assert (found.holds, found.measured) == (False, 9 * 2**20)
    assert found.where == "in another step than the traced one"
    assert gate(Limits(max_reserved_bytes=10 * 2**20), run).measured == 11 * 2**20


def test_the_slowest_rank_decides_and_is_named():
    """Rank 1 alone has steps of 110 ms; the median of the others is 102 ms."""
    run = make_run(num_ranks=3)
    steps = tuple(dataclasses.replace(step, end_s=step.start_s + 0.11) for step in run.ranks[1].steps)
    ranks = (run.ranks[0], dataclasses.replace(run.ranks[1], steps=steps), run.ranks[2])
    found = gate(Limits(max_step_time_s=0.105), dataclasses.replace(run, ranks=ranks))

    assert (found.holds, found.rank) == (False, 1)
    assert found.measured == pytest.approx(0.11)


def test_mfu_is_that_of_the_convention_asked_for():
    """143 278 080 FLOPs in 102 ms against 1e10 FLOP/s are 14.0 %."""
    found = gate(Limits(min_mfu=0.14))
    assert found.holds
    assert found.measured == pytest.approx(143_278_080 / 0.102 / 1e10)
    assert "convention exact" in found.where
    assert not gate(Limits(min_mfu=0.141)).holds
    assert gate(Limits(min_mfu=0.141, convention="palm")).holds  # which counts more FLOPs


@pytest.mark.parametrize(
    ("limits", "changes", "reason"),
    [
        (Limits(min_mfu=0.01), {}, "no peak FLOP/s of float32 is known for synthetic processor"),
        (Limits(min_hfu=0.01), {"traced_step": None}, "no traced step was finished"),
        (Limits(max_peak_bytes=2**40), {"traced_step": None}, "no step with the allocator's count"),
        (Limits(max_reserved_bytes=2**40), {}, "a CPU's allocator keeps no such count"),
        (Limits(max_step_time_s=9.0), {"num_steps": 0}, "no timed step was finished"),
        (Limits(max_exposed_communication=1.0), {"traced_step": None}, "no traced step was finished"),
        (Limits(max_exposed_communication=1.0), {"device": "cuda:0"}, "when a device computes"),
        (Limits(max_unexplained=1.0), {"traced_step": None}, "no traced step was finished"),
        (Limits(max_prediction_error=1.0), {}, "no plan was applied"),
        (Limits(max_prediction_error=1.0), {"plan": PLAN, "num_steps": 0}, "it was not measured"),
    ],
)
def test_what_was_not_recorded_does_not_pass(limits, changes, reason):
    judged = judge(analyze(make_run(**changes)), limits)

    assert not judged.holds
    assert all((found.holds, found.measured) == (False, None) for found in judged.gates)
    assert all(reason in found.unknown[0] for found in judged.gates)


def test_one_rank_that_did_not_record_it_is_enough():
    run = make_run(num_ranks=2)
    blind = dataclasses.replace(run.ranks[1], steps=())
    found = gate(Limits(max_step_time_s=9.0), dataclasses.replace(run, ranks=(run.ranks[0], blind)))

    assert not found.holds
    assert found.rank == 0
    assert found.unknown == ("rank 1: no timed step was finished",)


def test_exposed_and_unexplained_shares():
    """4 096 bytes of the peak are unexplained. One all-reduce of 2 ms is exposed in a traced step of 0.306 s."""
    found = gate(Limits(max_unexplained=0.01))
    assert found.measured == pytest.approx(4096 / PEAK_BYTES)

    run = make_run()
    step = run.ranks[0].traced_step
    exposed_s = analyze(run).ranks[0].communication.exposed_s
    found = gate(Limits(max_exposed_communication=0.5))
    assert found.holds
    assert found.measured == pytest.approx(exposed_s / step.duration_s)


def test_errors_of_a_prediction_count_in_both_directions():
    """Of test_comparison.py: the peak is predicted 23.4 % too high, the step time 20 % too low."""
    analysis = analyze(make_run(plan=PLAN))

    for limit, holding in ((0.19, [False, False]), (0.21, [False, True]), (0.24, [True, True])):
        gates = judge(analysis, Limits(max_prediction_error=limit)).gates
        assert [found.holds for found in gates] == holding


def test_growth_is_measured_from_the_baseline_rank_by_rank():
    grown = gate(Limits(max_growth=0.1), make_run(num_blocks=4), make_run())
    assert not grown.holds
    assert grown.measured > 0.1

    assert gate(Limits(max_growth=0.0), make_run(), make_run()).holds
    slower = gate(Limits(max_slowdown=0.05), make_run(block_s=0.01), make_run())
    assert not slower.holds
    assert gate(Limits(max_slowdown=0.05), make_run(block_s=0.007), make_run()).holds


def test_a_rank_that_was_not_recorded_to_its_end_fails_by_that_name():
    run = make_run(exit_code=None, num_ranks=1)
    judged = judge(
        analyze(dataclasses.replace(run, ranks=(stopped(run.ranks[0]),))), Limits(max_peak_bytes=2**40)
    )

    assert judged.missing == ("rank 0: recording stopped after 8 steps",)


def test_a_rank_that_the_baseline_lacks_fails():
    found = gate(Limits(max_growth=9.0), make_run(num_ranks=2), make_run(num_ranks=1))

    assert not found.holds
    assert found.unknown == ("rank 1: the baseline has no such rank",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_ranks": 3, "missing_ranks": (1, 2)}, "ranks 1, 2: no record"),
        ({"exit_code": None, "num_ranks": 1}, "rank 0: no ending (killed?) after 8 steps"),
        ({"exit_code": 1, "exception": "ValueError", "num_ranks": 1}, "rank 0: exit code 1 (ValueError)"),
        ({"problems": ("rank0.journal: torn",)}, "rank0.journal: torn"),
    ],
)
def test_a_record_that_is_not_whole_fails_though_all_limits_hold(changes, reason):
    judged = judge(analyze(make_run(**changes)), Limits(max_peak_bytes=2**40))

    assert all(found.holds for found in judged.gates)
    assert judged.missing == (reason,)
    assert not judged.holds


def test_the_error_of_a_warm_up_steps_time_says_that_it_is_of_one():
    run = make_run(plan=PLAN, num_steps=2, traced_step=None)
    found = judge(analyze(run, PROCESSOR), Limits(max_prediction_error=0.5)).gates

    assert [("a warm-up step" in each.where) for each in found if each.measured is not None] == [True]
