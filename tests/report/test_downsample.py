"""However few points are drawn, no maximum is lost."""

import base64
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.timeline import MemoryTimeline
from memadvisor.report.downsample import highest, kept_indices, merged, packed, packed_places


def _timeline(times_s, sizes):
    by_category = {"activation": np.array(sizes), "parameter": np.array(sizes[::-1])}
    return MemoryTimeline(
        start_s=0.0,
        clock_s=np.array(times_s),
        times_s=np.array(times_s),
        by_category_bytes=by_category,
        total_bytes=by_category["activation"] + by_category["parameter"],
    )


SIZES = st.lists(st.integers(0, 2**50), min_size=2, max_size=300)


@given(SIZES, st.integers(2, 20), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_maxima_survive_and_so_do_both_ends(sizes, num_bins, random):
    times_s = sorted(random.random() ** 4 for _ in sizes)
    timeline = _timeline(times_s, sizes)

    kept = kept_indices(timeline, num_bins)

    assert timeline.total_bytes[kept].max() == timeline.total_bytes.max()
    for series in timeline.by_category_bytes.values():
        assert series[kept].max() == series.max()
    assert kept[0] == 0 and kept[-1] == len(sizes) - 1
    assert (np.diff(kept) > 0).all()


def test_points_drawn_do_not_grow_with_the_run():
    sizes = list(range(100_000))

    assert len(kept_indices(_timeline(sizes, sizes), 500)) <= 4 * 500 + 4


def test_a_lone_spike_among_many_is_drawn_at_its_own_time():
    sizes = [7] * 50_000
    sizes[31_234] = 10**9

    assert 31_234 in kept_indices(_timeline(list(range(50_000)), sizes), 100)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=40), st.integers(0, 30))
def test_merging_closes_the_narrow_gaps_alone(steps, smallest_gap):
    intervals, now = [], 0
    for gap, length in steps:
        intervals.append((now + gap, now + gap + length))
        now += gap + length

    rows = merged(intervals, smallest_gap)

    assert all(after[0] - before[1] >= smallest_gap for before, after in pairwise(rows))
    assert all(any(row[0] <= start and end <= row[1] for row in rows) for start, end in intervals)
    assert [row[0] for row in rows[:1]] == [start for start, _ in intervals[:1]]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=400), st.integers(1, 50))
def test_the_largest_of_a_long_series_is_among_the_drawn(values, num_kept):
    positions = highest(values, num_kept)

    assert max(values[i] for i in positions) == max(values)
    assert len(positions) <= max(num_kept, min(len(values), num_kept))


@given(st.lists(st.floats(allow_nan=False)))
def test_packed_numbers_keep_every_bit(values):
    stored = packed(values)

    assert stored["dtype"] == "f8"
    assert np.frombuffer(base64.b64decode(stored["bdata"]), "<f8").tolist() == values


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_packed_places_keep_seven_digits(values):
    stored = packed_places(values)
    places = np.frombuffer(base64.b64decode(stored["bdata"]), "<f4")

    assert places == pytest.approx(values, rel=1e-7, abs=1e-30)
