"""The bubbles and peaks that the schedules' papers state, at equal chunks and free transfers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.pipelines import simulate_pipeline
from tests.cost.pipelines.shapes import SECONDS, unit_costs

DEVICES = st.integers(1, 8)
MICROBATCHES = st.integers(1, 24)


@given(st.sampled_from(["gpipe", "1f1b"]), DEVICES, MICROBATCHES, SECONDS, SECONDS, SECONDS)
@settings(max_examples=80, deadline=None)
def test_gpipe_and_1f1b_have_the_same_bubble(name, p, m, forward_s, input_s, weight_s):
    """(p-1)/(m+p-1) of the step."""
    times = simulate_pipeline(name, unit_costs(p, forward_s, input_s, weight_s), m, num_devices=p)

    assert times.bubble_share == pytest.approx((p - 1) / (m + p - 1))


@given(DEVICES, MICROBATCHES)
@settings(max_examples=60, deadline=None)
def test_gpipe_holds_all_microbatches_and_1f1b_as_many_as_devices_follow(p, m):
    gpipe, alternating = (
        simulate_pipeline(name, unit_costs(p), m, num_devices=p) for name in ("gpipe", "1f1b")
    )

    assert gpipe.peak_in_flight == (m,) * p
    assert alternating.peak_in_flight == tuple(min(p - device, m) for device in range(p))
    assert alternating.peak_held_bytes == tuple(1000 * min(p - device, m) for device in range(p))


@given(DEVICES, st.integers(1, 4), st.integers(1, 5), SECONDS)
@settings(max_examples=80, deadline=None)
def test_interleaving_divides_the_bubble_by_the_chunks(p, groups, v, backward_s):
    """(p-1)/(vm+p-1) of the step, for (1+(p-1)/(pv))pM on the first device."""
    m = groups * p
    costs = unit_costs(p * v, input_s=backward_s / 2, weight_s=backward_s / 2)
    times = simulate_pipeline("interleaved", costs, m, num_devices=p)

    assert times.bubble_share == pytest.approx((p - 1) / (v * m + p - 1))
    held = (v * p + p - 1) if v > 1 else p
    assert max(times.peak_in_flight) == times.peak_in_flight[0] == min(held, v * m)


@given(DEVICES, st.integers(0, 16), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_breadth_first_has_the_bubble_of_interleaving_and_the_peak_of_gpipe(p, more, v):
    m = p + more
    times = simulate_pipeline("breadth-first", unit_costs(p * v), m, num_devices=p)

    assert times.bubble_share == pytest.approx((p - 1) / (v * m + p - 1))
    assert times.peak_in_flight == (v * m,) * p


@given(DEVICES, MICROBATCHES)
@settings(max_examples=30, deadline=None)
def test_two_versions_of_the_weights_leave_no_bubble(p, m):
    times = simulate_pipeline("2bw", unit_costs(p), m, num_devices=p)

    assert times.bubble_share == pytest.approx(0)
    assert times.makespan_s > times.step_s or p == 1
