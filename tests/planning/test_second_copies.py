"""Second copies among near ranks are offered where gathers for the backward wait, at the price of their memory."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.cost.simulate import simulate
from memadvisor.errors import UsageError
from memadvisor.plan_checks import check_plan
from memadvisor.planning.advise import advise
from memadvisor.write_schedule import write_schedule
from tests.planning.test_advise import MEASURED, RUN

SLOW = replace(
    MEASURED,
    collectives=tuple(replace(c, durations_s=(1.0,), num_ranks=4) for c in MEASURED.collectives),
)
BUDGET = 1_500_000


def plans(budget_bytes, **words):
    return advise(RUN, memory_bytes=budget_bytes, num_ranks=4, hardware=SLOW, **words).plans


def test_plans_that_wait_for_gathers_get_copies_that_are_faster_and_take_more_memory():
    step, times = captured_step(RUN), times_from_curves(SLOW.collectives, 4, "a test")
    plain, near = plans(BUDGET), plans(BUDGET, near_ranks=2)
    found = [each for each in near if each.plan.secondary_ranks]

    assert near[0].plan.secondary_ranks == 2 and near[0].fits
    assert near[0].prediction.step_time_s < plain[0].prediction.step_time_s
    assert not any(each.plan.secondary_ranks for each in plain)
    for each in found:
        assert "among 2 near ones" in each.plan.why
        schedules = [write_schedule(replace(each.plan, secondary_ranks=n), step.units) for n in (2, None)]
        with_copies, without = (simulate(step, schedule, times) for schedule in schedules)
        assert with_copies.prediction() == each.prediction
        assert with_copies.step_time_s < without.step_time_s
        assert with_copies.sent_bytes < without.sent_bytes
        assert with_copies.peak_bytes >= without.peak_bytes


def test_copies_are_no_part_of_plans_that_they_do_not_serve_or_that_do_not_fit():
    """Under every budget: plans that can be had, and none clearly slower than without copies."""
    for budget_bytes in (1_350_000, 1_700_000, 4_000_000):
        plain, near = plans(budget_bytes), plans(budget_bytes, near_ranks=2)
        for each in near:
            check_plan(each.plan, "it")
            gathers_again = any(unit.zero_stage == 3 and unit.reshard for unit in each.plan.units)
            assert gathers_again or each.plan.secondary_ranks is None
        # As much as the local search over a stage for each unit may miss (tests/planning/test_advise.py).
        assert near[0].fits and near[0].prediction.step_time_s <= 1.05 * plain[0].prediction.step_time_s


@pytest.mark.parametrize("near_ranks", [1, 3, 4])
def test_ranks_that_cannot_share_copies_are_one_line(near_ranks):
    with pytest.raises(UsageError, match="cannot share second copies"):
        plans(BUDGET, near_ranks=near_ranks)
