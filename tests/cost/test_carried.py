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


def played(step, times, stage, *, by_unit, depth=0):
    plan = Plan(num_ranks=2, zero_stage=stage, overlap=True, update_by_unit=by_unit, gather_depth=depth)
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


@given(st.floats(4.0, 9.0), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_what_a_forward_of_stage_3_begins_with_is_there_from_its_update_on(exponent, num_blocks, depth):
    """Beside what an update by itself takes more, a step is no longer; it sends as much, and its forward holds as much."""
    step, times = captured_step(make_run(num_ranks=2, num_blocks=num_blocks)), over(10**exponent)
    usual, by_unit = (played(step, times, 3, by_unit=one, depth=depth) for one in (False, True))

    apart_s = UNIT_UPDATE_S["cpu"] * len(step.units)
    assert by_unit.step_time_s <= usual.step_time_s + apart_s + 1e-9
    assert by_unit.sent_bytes == usual.sent_bytes
    assert sum(by_unit.components_s.values()) == pytest.approx(by_unit.step_time_s)
    plan = Plan(num_ranks=2, zero_stage=3, overlap=True, update_by_unit=True, gather_depth=depth)
    first = write_schedule(plan, step.units).gathered_behind_updates
    first_bytes = sum(step.states[name].parameter_bytes for name in first)
    [before, *_], [(place, _), *_] = held(usual), (both := held(by_unit))
    assert place == before[0] and both[0][1] - before[1] == first_bytes
    ends = [moments[-1] for moments in (held(usual), both)]
    assert ends[0][0] == ends[1][0] == "optimizer step"
    assert ends[1][1] - ends[0][1] == first_bytes


def held(simulation):
    """Bytes of parameters at each moment, and where it is."""
    return [(moment.position, moment.by_category_bytes["parameter"]) for moment in simulation.moments]


def test_a_forward_of_stage_3_waits_less_for_its_first_unit_by_the_updates_behind_it():
    """And by what the script does before the forward."""
    step = captured_step(make_run(num_ranks=2))
    first = step.units[0].name
    for link_bytes_per_s in (2e4, 2e6, 2e8):
        usual, by_unit = (
            played(step, over(link_bytes_per_s), 3, by_unit=one, depth=1) for one in (False, True)
        )
        _, *behind = [i for i in by_unit.lanes.intervals if i.label.startswith("update of")]
        [until_s, *_] = [i.start_s for i in usual.lanes.intervals if i.label == f"gather {first}"]
        took_s = step.states[first].parameter_bytes / link_bytes_per_s / 2  # of two ranks half is sent
        less_s = usual.exposed_communication_s - by_unit.exposed_communication_s
        assert less_s == pytest.approx(min(took_s, until_s + sum(i.end_s - i.start_s for i in behind)))


def test_one_unit_has_nothing_to_travel_under():
    step = captured_step(make_run(num_ranks=2))
    one = replace(step, units=step.units[:1])
    usual, by_unit = (played(one, over(1e6), 1, by_unit=way) for way in (False, True))
    assert by_unit.exposed_communication_s == pytest.approx(usual.exposed_communication_s, rel=1e-6)
