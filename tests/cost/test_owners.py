"""Whole parameters are shared out evenly, and in the same way by everybody."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.owners import Cost, share_out


def loads(sizes, owners, num_ranks):
    return [
        sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)
    ]


@given(st.lists(st.integers(1, 1000), max_size=7), st.integers(2, 4))
def test_the_largest_load_is_within_grahams_bound_of_the_best(sizes, num_ranks):
    owners = share_out([Cost(size, size) for size in sizes], num_ranks)
    best = min(
        max(loads(sizes, choice, num_ranks)) for choice in product(range(num_ranks), repeat=len(sizes))
    )
    assert max(loads(sizes, owners, num_ranks)) <= best * (4 / 3 - 1 / (3 * num_ranks)) + 1e-9


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=6), st.integers(2, 3))
def test_bytes_and_work_are_both_balanced(pairs, num_ranks):
    """The larger share of the two is never twice the best one beyond what a single parameter weighs."""
    costs = [Cost(*pair) for pair in pairs]
    total = [sum(kind) or 1 for kind in zip(*pairs, strict=True)] or [1, 1]

    def worst(owners):
        return max(
            max(loads([pair[kind] for pair in pairs], owners, num_ranks)) / total[kind] for kind in (0, 1)
        )

    owners = share_out(costs, num_ranks)
    best = min(map(worst, product(range(num_ranks), repeat=len(costs))))
    assert worst(owners) <= 2 * best + 1e-9


def test_what_ranks_have_already_counts():
    assert share_out([Cost(4, 4), Cost(3, 3)], 2, [Cost(6, 6), Cost(0, 0)]) == [1, 1]
    assert share_out([], 2) == []
    assert share_out([Cost(0, 0)], 2) == [0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_equal_parameters_go_round(num_ranks):
    owners = share_out([Cost(5, 5)] * 6, num_ranks)
    assert owners == [index % num_ranks for index in range(6)]
