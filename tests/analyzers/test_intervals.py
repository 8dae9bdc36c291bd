from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.intervals import holds, length, minus, union

MOMENTS = range(-1, 22)
INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12)


def _inside(intervals):
    """Brute force: the whole moments that some interval covers."""
    return {moment for moment in MOMENTS for start, end in intervals if start <= moment < end}


@given(INTERVALS)
def test_union_covers_the_same_moments_in_order_and_apart(intervals):
    merged = union(intervals)

    assert _inside(merged) == _inside(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(merged))


@given(INTERVALS, INTERVALS)
def test_minus_leaves_what_only_the_left_covers(left, right):
    rest = minus(union(left), union(right))

    assert _inside(rest) == _inside(left) - _inside(right)
    assert length(rest) == len(_inside(rest))


def test_intervals_that_touch_become_one():
    assert union([(1, 2), (2, 3), (5, 5), (7, 6)]) == ((1, 3),)


@given(INTERVALS, st.integers(-1, 21))
def test_a_moment_is_held_from_start_to_before_the_end(intervals, moment):
    assert holds(union(intervals), moment) == (moment in _inside(intervals))
