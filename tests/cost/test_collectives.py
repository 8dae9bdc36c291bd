"""Collective times: the ring's formula, measured curves between and beyond their points, and fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.collectives import (
    Observation,
    curve_seconds,
    fit_ring,
    ring_seconds,
    times_from_curves,
    times_of_sizes,
    tree_all_reduce_seconds,
)
from memadvisor.hardware.hardware import CollectiveCurve

CURVE = CollectiveCurve(
    operation="all_gather", num_ranks=4, sizes_bytes=(1000, 2000, 4000), durations_s=(1.0, 3.0, 4.0)
)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    size, ranks, alpha, beta = 1e8, 8, 1e-5, 1e10
    parts = sum(ring_seconds(name, size, ranks, alpha, beta) for name in ("reduce_scatter", "all_gather"))

    assert ring_seconds("all_reduce", size, ranks, alpha, beta) == pytest.approx(parts)
    # 2 (n-1) alpha + 2 (n-1)/n S/beta, by hand
    assert parts == pytest.approx(14e-5 + 2 * 7 / 8 * 1e-2)


def test_a_tree_beats_a_ring_where_latency_counts():
    """1,024 ranks and a kilobyte: 20 rounds against 2,046."""
    tree = tree_all_reduce_seconds(1024, 1024, 1e-5, 1e11)
    assert tree == pytest.approx(20e-5, rel=0.01)
    assert tree < ring_seconds("all_reduce", 1024, 1024, 1e-5, 1e11) / 50


@pytest.mark.parametrize(
    ("size", "seconds"), [(10, 1.0), (1000, 1.0), (1500, 2.0), (3000, 3.5), (4000, 4.0), (6000, 5.0)]
)
def test_a_curve_is_linear_between_its_points_flat_before_and_straight_on_after(size, seconds):
    assert curve_seconds(CURVE, size) == pytest.approx(seconds)


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=6, unique=True), st.data())
def test_a_curve_passes_through_its_points_and_is_never_negative(sizes, data):
    sizes = tuple(sorted(sizes))
    durations = tuple(data.draw(st.floats(1e-6, 10)) for _ in sizes)
    curve = CollectiveCurve(operation="all_reduce", num_ranks=2, sizes_bytes=sizes, durations_s=durations)
    for size, duration in zip(sizes, durations, strict=True):
        assert curve_seconds(curve, size) == pytest.approx(duration)
    assert curve_seconds(curve, 10 * sizes[-1]) > durations[-1]


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12), st.integers(2, 16))
def test_a_fit_finds_the_link_that_made_the_observations(alpha, beta, ranks):
    sizes = [int(alpha * beta * factor) + 1 for factor in (0.1, 1, 10, 100)]
    seen = [
        Observation(
            operation=name,
            num_ranks=ranks,
            size_bytes=size,
            duration_s=ring_seconds(name, size, ranks, alpha, beta),
        )
        for name in ("all_reduce", "all_gather")
        for size in sizes
    ]
    assert fit_ring(seen) == pytest.approx((alpha, beta), rel=1e-3)


def test_one_size_alone_is_all_bandwidth_and_nothing_is_nothing():
    one = Observation(operation="all_reduce", num_ranks=2, size_bytes=1000, duration_s=2.0)
    assert fit_ring([one, one]) == pytest.approx((0.0, 500.0))
    assert fit_ring([]) is None


def test_curves_of_another_number_of_ranks_are_carried_over_by_the_rings_traffic():
    curves = [
        CollectiveCurve(operation=name, num_ranks=2, sizes_bytes=(1000,), durations_s=(1.0,))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    times = times_from_curves(curves, 4, "a test")
    assert times.seconds("all_gather", 1000, 2) == 1.0
    assert times.seconds("all_gather", 1000, 4) == pytest.approx((3 / 4) / (1 / 2))
    assert times.seconds("all_gather", 1000, 1) == 0.0
    assert times_from_curves(curves[:2], 4, "a test") is None


def test_curves_of_sizes_are_of_the_ranks_that_each_operation_has():
    """Shards are gathered among four, and summed across two groups of these."""
    seen = [
        Observation(operation=operation, num_ranks=ranks, size_bytes=800, duration_s=duration_s)
        for operation, ranks, duration_s in (
            ("all_gather", 4, 1.0),
            ("all_gather", 4, 2.0),
            ("all_gather", 4, 3.0),
            ("all_reduce", 2, 5.0),
        )
    ]
    times = times_of_sizes(seen, "a test")

    assert times.seconds("all_gather", 800, 4) == 2.0
    assert times.seconds("all_reduce", 800, 2) == 5.0


def test_small_messages_as_slow_as_large_ones_are_latency_and_make_no_large_one_absurd():
    """Eight bytes that take 95 ms say nothing of bandwidth: a megabyte must not take minutes for it."""
    seen = [
        Observation(operation="all_gather", num_ranks=2, size_bytes=size, duration_s=time_s)
        for size, time_s in ((8, 0.095), (8, 0.005), (208, 0.005), (2_380_800, 0.003))
    ]
    alpha, beta = fit_ring(seen)

    assert 0 < alpha < 0.095
    assert ring_seconds("all_gather", 2_380_800, 2, alpha, beta) < 0.1
