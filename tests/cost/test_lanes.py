"""Lanes: what runs at the same time, and what that costs both sides."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.lanes import NO_COLLECTIVE, Carried, Lanes
from memadvisor.hardware.hardware import OverlapSlowdown
from memadvisor.schedule import Lane

SECONDS = st.floats(0.0, 10.0)
FACTORS = st.floats(1.0, 3.0)


def test_both_go_on_at_their_slower_pace_until_one_of_them_ends():
    """3 s of compute and 1 s of a collective, at factors of 2 and 1.5: 1.5 s together, in which compute does 0.75 s."""
    lanes = Lanes(OverlapSlowdown(compute=2.0, collective=1.5))
    number = lanes.collective("reduce", 1.0)
    lanes.compute("backward", 3.0)
    lanes.wait_for(number)

    assert lanes.compute_s == pytest.approx(1.5 + 2.25)
    assert lanes.slowed_s == pytest.approx(0.75)
    assert lanes.exposed_s == 0
    reduce = next(i for i in lanes.intervals if i.lane is Lane.COLLECTIVE)
    assert (reduce.start_s, reduce.end_s) == pytest.approx((0, 1.5))


def test_what_is_left_when_compute_ends_runs_alone():
    """1 s of compute takes 2 s, in which 4 s of a collective get on by 1 s at a factor of 2; the other 3 s are exposed."""
    lanes = Lanes(OverlapSlowdown(compute=2.0, collective=2.0))
    number = lanes.collective("reduce", 4.0)
    lanes.compute("backward", 1.0)
    lanes.wait_for(number)

    assert (lanes.compute_s, lanes.exposed_s) == pytest.approx((5.0, 3.0))


def test_a_collective_is_late_by_its_mean_less_what_compute_has_hidden_of_it():
    """It should be over after 1 s. At 4 s its delay, of 1.5 s on average, is still due by exp(-2)."""
    lanes = Lanes(OverlapSlowdown(compute=1.0, collective=1.0, late_s=1.5))
    number = lanes.collective("gather", 1.0)
    lanes.compute("forward", 4.0)
    lanes.wait_for(number)
    lanes.wait_for(number)
    assert lanes.exposed_s == pytest.approx(1.5 * math.exp(-2))

    before_s = lanes.compute_s
    lanes.wait_for(lanes.collective("gather", 0.5))
    assert lanes.compute_s - before_s == pytest.approx(0.5 + 1.5)


@pytest.mark.parametrize(("follows", "end_s"), [(True, 3 + 2 * 1.5), (False, 3 + 1.5)])
def test_a_delay_passes_on_to_what_the_same_thread_does_next(follows, end_s):
    lanes = Lanes(OverlapSlowdown(compute=1.0, collective=1.0, late_s=1.5))
    lanes.collective("reduce", 1.0)
    lanes.wait_for(lanes.collective("gather", 2.0, follows=follows))
    assert lanes.compute_s == pytest.approx(end_s)


def test_ranks_meet_beside_what_is_under_way_on_the_lane():
    lanes = Lanes(OverlapSlowdown(compute=1.0, collective=1.0, late_s=0.5))
    number = lanes.collective("gather", 10.0)
    lanes.meet(1.0)
    assert (lanes.compute_s, lanes.exposed_s) == pytest.approx((1.5, 1.5))
    lanes.wait_for(number)
    assert lanes.compute_s == pytest.approx(10.5)


def test_the_slowest_rank_comes_later_by_its_share_of_what_was_computed_since_ranks_last_met():
    lanes = Lanes(OverlapSlowdown(compute=1.0, collective=1.0, spread=0.1))
    lanes.compute("forward", 10.0)
    lanes.wait_for(lanes.collective("reduce", 1.0))
    assert (lanes.compute_s, lanes.exposed_s) == pytest.approx((12.0, 2.0))

    lanes.meet(1.0)
    assert lanes.compute_s == pytest.approx(13.0)

    lanes.compute("backward", 10.0)
    number = lanes.collective("reduce", 1.0)
    lanes.compute("backward", 1.5)  # the other rank comes after 1 s of it
    lanes.wait_for(number)
    assert lanes.compute_s == pytest.approx(25.0)


KINDS = st.sampled_from(["compute", "lane", "torch", "meeting", "wait"])


@given(st.lists(st.tuples(KINDS, SECONDS), max_size=12), FACTORS, FACTORS, SECONDS, st.floats(0.0, 1.0))
def test_a_slowdown_never_makes_a_step_faster_and_no_second_is_lost(
    work, compute, collective, late_s, spread
):
    def play(slowdown):
        lanes, last = Lanes(slowdown), NO_COLLECTIVE
        for kind, seconds in work:
            if kind == "compute":
                lanes.compute("", seconds)
            elif kind == "meeting":
                lanes.meet(seconds)
            elif kind == "wait":
                lanes.wait_for(last)
            else:
                last = lanes.collective("", seconds, follows=kind == "lane")
        lanes.wait_for(last)
        return lanes

    plain = play(OverlapSlowdown(compute=1.0, collective=1.0))
    slowed = play(OverlapSlowdown(compute=compute, collective=collective))
    late = play(OverlapSlowdown(compute=compute, collective=collective, late_s=late_s, spread=spread))
    computing = sum(seconds for kind, seconds in work if kind == "compute")

    assert plain.slowed_s == pytest.approx(0)
    for lanes in (plain, slowed, late):
        assert lanes.compute_s == pytest.approx(computing + lanes.slowed_s + lanes.exposed_s)
    if 1 / compute + 1 / collective >= 1:  # else it is faster not to do both at once
        assert plain.compute_s - 1e-9 <= slowed.compute_s <= late.compute_s + 1e-9


def test_what_goes_on_in_the_next_step_is_shown_where_this_one_ends():
    """Of 3 s under 1 s of updates, at factors of 2 on both sides: 2 s pass, in which 1 s of it and all of them are done."""
    lanes = Lanes(OverlapSlowdown(compute=2.0, collective=2.0))
    number = lanes.collective("gather", 3.0)
    lanes.compute("update", 1.0)
    carried = lanes.begin_step()
    lanes.wait_for(number)
    assert (lanes.compute_s, lanes.exposed_s) == pytest.approx((2.0, 2.0))

    lanes.compute("update", 1.0)
    lanes.end_step(carried)
    assert (lanes.compute_s, lanes.slowed_s) == pytest.approx((4.0, 1.0))
    gathers = [(i.start_s, i.end_s) for i in lanes.intervals if i.lane is Lane.COLLECTIVE]
    assert gathers == [pytest.approx((0.0, 2.0)), pytest.approx((2.0, 4.0))]
    assert lanes.alone_s == {"update": pytest.approx(1.0)}


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5), SECONDS)
def test_a_step_that_begins_with_what_is_under_way_shows_all_of_it_and_waits_no_longer(updates, forward_s):
    """Of updates each followed by a collective: against the same, all begun when the step does."""
    early, late = Lanes(), Lanes()
    for update_s, gather_s in updates:
        early.compute("update", update_s)
        last = early.collective("gather", gather_s)
    carried = early.begin_step()
    for _, gather_s in updates:
        late.collective("gather", gather_s)
    for lanes in (early, late):
        lanes.compute("forward", forward_s)
        lanes.wait_for(last)
        lanes.end_step(carried if lanes is early else Carried())
    shown_s = sum(i.end_s - i.start_s for i in early.intervals if i.lane is Lane.COLLECTIVE)
    assert shown_s == pytest.approx(sum(gather_s for _, gather_s in updates), abs=1e-9)
    assert early.compute_s <= late.compute_s + 1e-9
