"""Lanes: what runs at the same time, and what that costs both sides."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.lanes import NO_COLLECTIVE, Lanes
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
    """Both are issued at 0 and over after 1 and 2 s. At 4 s the first one's delay, of 1.5 s on average, is due by exp(-2)."""
    lanes = Lanes(OverlapSlowdown(compute=1.0, collective=1.0, late_s=1.5))
    first, second = lanes.collective("gather", 1.0), lanes.collective("reduce", 1.0)
    lanes.compute("forward", 4.0)
    lanes.wait_for(first)
    lanes.wait_for(first)
    assert lanes.exposed_s == pytest.approx(1.5 * math.exp(-2))

    before_s = lanes.compute_s
    lanes.wait_for(second)
    assert lanes.compute_s - before_s == pytest.approx(1.5 * math.exp(-(before_s - 2) / 1.5))

    before_s = lanes.compute_s
    lanes.wait_for(lanes.collective("meeting", 0.5))
    assert lanes.compute_s - before_s == pytest.approx(0.5 + 1.5)


def test_the_slowest_rank_comes_later_by_its_share_of_what_was_computed_since_ranks_last_met():
    lanes = Lanes(OverlapSlowdown(compute=1.0, collective=1.0, spread=0.1))
    lanes.compute("forward", 10.0)
    lanes.wait_for(lanes.collective("meeting", 1.0))
    assert (lanes.compute_s, lanes.exposed_s) == pytest.approx((12.0, 2.0))

    lanes.wait_for(lanes.collective("meeting", 1.0))
    assert lanes.compute_s == pytest.approx(13.0)

    lanes.compute("backward", 10.0)
    number = lanes.collective("reduce", 1.0)
    lanes.compute("backward", 1.5)  # the other rank comes after 1 s of it
    lanes.wait_for(number)
    assert lanes.compute_s == pytest.approx(25.0)


@given(
    st.lists(st.tuples(st.booleans(), SECONDS), max_size=12), FACTORS, FACTORS, SECONDS, st.floats(0.0, 1.0)
)
def test_a_slowdown_never_makes_a_step_faster_and_no_second_is_lost(
    work, compute, collective, late_s, spread
):
    def play(slowdown):
        lanes, last = Lanes(slowdown), NO_COLLECTIVE
        for is_compute, seconds in work:
            if is_compute:
                lanes.compute("", seconds)
            else:
                last = lanes.collective("", seconds)
        lanes.wait_for(last)
        return lanes

    plain = play(OverlapSlowdown(compute=1.0, collective=1.0))
    slowed = play(OverlapSlowdown(compute=compute, collective=collective))
    late = play(OverlapSlowdown(compute=compute, collective=collective, late_s=late_s, spread=spread))
    computing = sum(seconds for is_compute, seconds in work if is_compute)

    assert slowed.compute_s >= plain.compute_s - 1e-9
    assert late.compute_s >= slowed.compute_s - 1e-9 or 1 / compute + 1 / collective < 1
    for lanes in (plain, slowed, late):
        assert lanes.compute_s == pytest.approx(computing + lanes.slowed_s + lanes.exposed_s)
    assert plain.slowed_s == pytest.approx(0)
