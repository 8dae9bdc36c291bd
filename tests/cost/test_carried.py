"""Units updated one after another, of which the first begin to go to the other ranks while the last are updated."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.engine_time import UNIT_UPDATE_S
from memadvisor.cost.simulate import simulate
from memadvisor.plan import Plan
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.make_run import make_run


def played(step, times, stage, *, by_unit):
    plan = Plan(num_ranks=2, zero_stage=stage, overlap=True, update_by_unit=by_unit)
    return simulate(step, write_schedule(plan, step.units), times)


def over(link_bytes_per_s):
    return CollectiveTimes(
        kind="fitted", source="a test", curves={}, alpha_s=0.0, beta_bytes_per_s=link_bytes_per_s
    )


def gathers(simulation):
    return [
        i for i in simulation.lanes.intervals if i.lane is Lane.COLLECTIVE and i.label.startswith("gather")
    ]


@given(st.sampled_from([1, 2]), st.floats(4.0, 9.0), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_step_is_no_longer_and_sends_as_much_and_holds_as_much(stage, exponent, num_blocks):
    """Beside what an update by itself takes more."""
    step, times = captured_step(make_run(num_ranks=2, num_blocks=num_blocks)), over(10**exponent)
    usual, by_unit = (played(step, times, stage, by_unit=one) for one in (False, True))

    apart_s = UNIT_UPDATE_S["cpu"] * len(step.units)
    assert by_unit.step_time_s <= usual.step_time_s + apart_s + 1e-9
    assert by_unit.sent_bytes == usual.sent_bytes
    assert by_unit.peak_bytes == usual.peak_bytes
    assert sum(by_unit.components_s.values()) == pytest.approx(by_unit.step_time_s)
    took_s = [sum(i.end_s - i.start_s for i in gathers(one)) for one in (usual, by_unit)]
    assert took_s[0] == pytest.approx(took_s[1])


def test_where_a_forward_waits_for_all_gathers_it_waits_less_by_the_updates_behind_the_first():
    """They are on their way one after another from the end of the first unit's update, and not of the last one's."""
    step, times = captured_step(make_run(num_ranks=2)), over(2e6)
    usual, by_unit = (played(step, times, 1, by_unit=one) for one in (False, True))
    _, *behind = [i for i in by_unit.lanes.intervals if i.label.startswith("update of")]
    saved_s = sum(i.end_s - i.start_s for i in behind)

    assert usual.exposed_communication_s - by_unit.exposed_communication_s == pytest.approx(saved_s)
    first, *_, last = gathers(by_unit)
    assert (first.start_s, last.end_s) == (
        0,
        pytest.approx(by_unit.step_time_s),
    )  # as it was before, and will be


def test_one_unit_has_nothing_to_travel_under():
    step = captured_step(make_run(num_ranks=2))
    one = replace(step, units=step.units[:1])
    usual, by_unit = (played(one, over(1e6), 1, by_unit=way) for way in (False, True))
    assert by_unit.exposed_communication_s == pytest.approx(usual.exposed_communication_s, rel=1e-6)
