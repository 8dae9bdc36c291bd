import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.components import COMPONENTS, components_of
from memadvisor.cost.lanes import Lanes


@given(st.lists(st.floats(1e-9, 10.0), min_size=1, max_size=30))
def test_components_are_never_below_zero_and_sum_to_the_end_of_compute(durations_s):
    lanes = Lanes()
    for number, seconds in enumerate(durations_s):
        lanes.compute(f"{'recomputation' if number % 3 else 'forward'} {number}", seconds)
    found = components_of(lanes)
    assert set(found) == set(COMPONENTS)
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(lanes.compute_s)


def test_a_difference_of_times_that_rounds_below_zero_is_nothing():
    lanes = Lanes(slowed_s=-8.7e-18)
    assert components_of(lanes)["overlap_slowdown"] == 0.0
