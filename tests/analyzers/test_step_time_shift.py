import itertools
import random
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.step_time_shift import _mann_whitney_counts, shift

DURATIONS = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=8)


@pytest.mark.parametrize(("num_first", "num_second"), [(1, 1), (2, 3), (4, 4), (5, 3)])
def test_the_distribution_of_ranks_is_that_of_all_orders(num_first, num_second):
    counts = [0] * (num_first * num_second + 1)
    for places in itertools.combinations(range(num_first + num_second), num_first):
        others = set(range(num_first + num_second)) - set(places)
        counts[sum(other < place for place in places for other in others)] += 1

    assert _mann_whitney_counts(num_first, num_second) == counts
    assert sum(counts) == comb(num_first + num_second, num_first)


def test_steps_that_never_overlap_are_told_apart():
    """Four and four: each of the second run's is 10 ms longer than the longest of the first."""
    found = shift([0.100, 0.101, 0.102, 0.103], [0.113, 0.114, 0.115, 0.116])

    assert found.shift_s == pytest.approx(0.013)
    assert found.interval_s == pytest.approx((0.010, 0.016))
    assert found.is_significant


def test_three_steps_and_three_are_too_few():
    """Any order of them comes about by chance in 2 of 20 cases."""
    found = shift([1.0, 1.1, 1.2], [5.0, 5.1, 5.2])

    assert found.interval_s is None
    assert found.is_significant is None


def test_the_interval_is_that_of_the_books_table():
    """For 9 and 9 the table's critical value at 5 %, two-sided, is 17: the 18th smallest difference bounds it."""
    first, second = [float(n * n) for n in range(9)], [n * n + 0.5 * n for n in range(9)]
    differences = sorted(b - a for a in first for b in second)

    assert shift(first, second).interval_s == (differences[17], differences[-18])


def test_the_interval_holds_the_true_shift_as_often_as_it_says():
    """Of 1 500 pairs of runs whose steps are 50 ms apart in truth; 95 % is 1 425, and chance adds or takes 35."""
    noise = random.Random(7)
    held = 0
    for _ in range(1500):
        first = [noise.gauss(1.0, 0.1) for _ in range(9)]
        low, high = shift(first, [noise.gauss(1.05, 0.1) for _ in range(7)]).interval_s
        held += low <= 0.05 <= high

    assert held >= 1390


def test_long_runs_are_compared_by_stretches():
    steps_s = list(np.linspace(0.1, 0.2, 20_000))
    found = shift(steps_s, [step_s + 0.2 for step_s in steps_s])

    assert (found.num_before, found.num_after) == (50, 50)
    assert found.shift_s == pytest.approx(0.2)
    assert found.is_significant


def test_without_steps_there_is_no_shift():
    assert shift([], [1.0]) is None
    assert shift([1.0], []) is None


@given(DURATIONS)
def test_a_run_does_not_differ_from_itself(durations_s):
    found = shift(durations_s, durations_s)

    assert found.shift_s == 0
    assert not found.is_significant


@given(DURATIONS, DURATIONS)
def test_the_other_way_round_the_sign_alone_changes(before_s, after_s):
    there, back = shift(before_s, after_s), shift(after_s, before_s)

    assert there.shift_s == pytest.approx(-back.shift_s)
    if there.interval_s is not None:
        assert there.interval_s == (-back.interval_s[1], -back.interval_s[0])
