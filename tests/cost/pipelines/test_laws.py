"""The bubbles and peaks that the schedules' papers state, at equal chunks and free transfers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.pipelines import simulate_pipeline
from memadvisor.cost.pipelines.costs import ChunkCosts
from tests.cost.pipelines.shapes import SECONDS, pipelines, unit_costs

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


@given(st.integers(2, 14), st.integers(0, 20), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_balancing_leaves_no_device_more_than_half_of_the_microbatches(p, more, balance_s):
    """ceil((p+2)/2) microbatches (Kim et al., ICML 2023) and 1F1B's time, if a move takes no longer than a forward."""
    m = p + more
    balanced, plain = (
        simulate_pipeline(name, unit_costs(p), m, num_devices=p, balance_s=balance_s)
        for name in ("bpipe", "1f1b")
    )

    assert balanced.makespan_s == plain.makespan_s
    assert max(balanced.peak_in_flight) == min(p, -(-(p + 2) // 2))
    assert max(balanced.peak_held_bytes) == 1000 * max(balanced.peak_in_flight)


@given(DEVICES, MICROBATCHES)
@settings(max_examples=30, deadline=None)
def test_two_versions_of_the_weights_leave_no_bubble(p, m):
    times = simulate_pipeline("2bw", unit_costs(p), m, num_devices=p)

    assert times.bubble_share == pytest.approx(0)
    assert times.makespan_s > times.step_s or p == 1


SPLIT = st.tuples(SECONDS, SECONDS, SECONDS).map(lambda times: (times[0], times[1], min(times) / 2))


@given(st.integers(1, 8), st.integers(0, 16), SPLIT)
@settings(max_examples=80, deadline=None)
def test_zb_h1_has_a_third_of_the_bubble_at_the_same_peak(p, more, times):
    """(p-1)(F+B-W) and pM, where W is not the longest."""
    forward_s, input_s, weight_s = times
    costs = unit_costs(p, forward_s, input_s, weight_s, held=1000, weight_held=900)
    step = simulate_pipeline("zb-h1", costs, p + more, num_devices=p)

    assert step.bubble_s == pytest.approx((p - 1) * (forward_s + input_s - weight_s), abs=1e-9)
    assert step.peak_held_bytes == tuple(1000 * (p - d) + 900 * d for d in range(p))


@given(st.integers(1, 8), st.integers(0, 16), SPLIT)
@settings(max_examples=80, deadline=None)
def test_zb_h2_trades_memory_for_what_is_left_of_the_bubble(p, more, times):
    """(p-1)(F+B-2W) and (2p-1)M, from 2p-1 microbatches on."""
    forward_s, input_s, weight_s = times
    costs = unit_costs(p, forward_s, input_s, weight_s)
    step = simulate_pipeline("zb-h2", costs, 2 * p - 1 + more, num_devices=p)

    assert step.bubble_s == pytest.approx((p - 1) * (forward_s + input_s - 2 * weight_s), abs=1e-9)
    assert step.peak_in_flight == tuple(2 * (p - d) - 1 for d in range(p))


@given(st.integers(1, 10), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_zb_v_has_no_bubble_and_the_peak_of_1f1b_on_every_device(p, more):
    """At F = B = W from 2p microbatches on; chunks are half stages, so 2p of them are pM."""
    step = simulate_pipeline("zb-v", unit_costs(2 * p, weight_held=1000), 2 * p + more, num_devices=p)

    assert step.bubble_s == pytest.approx(0)
    assert step.peak_held_bytes == (1000 * 2 * p,) * p


@given(st.integers(1, 5), st.integers(1, 4), SECONDS)
@settings(max_examples=60, deadline=None)
def test_chimera_has_about_half_the_bubble_of_1f1b(half, units, seconds):
    """(p-2)/(2m+p-2) of the step where forward and backward take alike (arXiv:2107.06925, table 2)."""
    p, m = 2 * half, 2 * half * units
    costs = unit_costs(p, seconds, seconds / 2, seconds / 2)
    step = simulate_pipeline("chimera", costs, m, num_devices=p)

    assert step.bubble_share == pytest.approx((p - 2) / (2 * m + p - 2))
    assert max(step.peak_in_flight) <= p


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_chimera_has_less_of_a_bubble_in_one_unit_with_longer_backwards_too(p):
    """2(p-2)F where a backward takes two forwards' time; 1F1B has 3(p-1)F."""
    step = simulate_pipeline("chimera", unit_costs(p), p, num_devices=p)

    assert step.bubble_s == pytest.approx(2 * (p - 2))


@given(st.integers(1, 5), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_dualpipe_has_the_bubble_that_its_paper_says(half, more):
    """(p/2-1)(F&B + B - 3W), where B is the whole backward, and p+1 in flight (arXiv:2412.19437, table 2)."""
    p = 2 * half
    step = simulate_pipeline("dualpipe", unit_costs(p), 2 * p + 2 * more, num_devices=p)

    assert step.bubble_s == pytest.approx((half - 1) * (3 + 2 - 3 * 1))
    assert step.peak_in_flight == (p + 1,) * p


@given(st.integers(1, 6), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_dualpipe_v_has_dualpipes_bubble_of_twice_the_devices_with_one_copy_of_the_weights(p, more):
    """(p-1)(F&B + B - 3W) of its chunks, of which 2p+1 are held: half a stage each (DualPipe's README)."""
    step = simulate_pipeline("dualpipe-v", unit_costs(2 * p), 2 * p + more, num_devices=p)

    assert step.bubble_s == pytest.approx((p - 1) * (3 + 2 - 3 * 1))
    assert step.peak_in_flight == (2 * p + 1,) * p
    assert step.weight_copies == 1


@given(pipelines(names=["zb-1p", "zb-2p"], most_devices=5, most_microbatches=12))
@settings(max_examples=40, deadline=None)
def test_automatic_schedules_keep_their_limit_and_beat_those_drawn_by_hand(pipeline):
    """Never more than once or twice 1F1B's peak; never slower than ZB-H1, which has that peak for equal chunks."""
    name, p, m, costs, links = pipeline
    costs = [costs[0]] * p
    automatic, by_hand, alternating = (
        simulate_pipeline(each, costs, m, num_devices=p, transfer_s=links) for each in (name, "zb-h1", "1f1b")
    )

    factor = 1 if name == "zb-1p" else 2
    assert max(automatic.peak_held_bytes) <= factor * max(alternating.peak_held_bytes)
    assert automatic.step_s <= by_hand.step_s + 1e-9


def test_a_lighter_first_chunk_leaves_the_automatic_schedule_its_memory():
    """pM is of a full chunk: the first, which has a layer less beside the embedding, is no reason for a bubble."""
    costs = [
        ChunkCosts(
            forward_s=n,
            input_backward_s=n,
            weight_backward_s=n,
            activation_bytes=n,
            weight_activation_bytes=n,
        )
        for n in (2, 3, 3, 2)
    ]
    automatic, by_hand = (simulate_pipeline(name, costs, 12, num_devices=4) for name in ("zb-1p", "zb-h1"))
    assert max(by_hand.peak_held_bytes) <= 4 * 3
    assert automatic.step_s <= by_hand.step_s
