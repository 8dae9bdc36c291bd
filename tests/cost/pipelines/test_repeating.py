"""A long step from a short one, against the long one played."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.pipelines import simulate_pipeline
from memadvisor.cost.pipelines.repeating import play_repeating
from tests.cost.pipelines.shapes import chunk_costs, unit_costs


@st.composite
def long_steps(draw):
    name = draw(st.sampled_from(["1f1b", "interleaved"]))
    devices = draw(st.integers(1, 5))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    microbatches = devices * draw(st.integers(5, 24))
    if name == "1f1b":
        microbatches += draw(st.integers(0, devices))
    kinds = draw(st.lists(chunk_costs(), min_size=1, max_size=3))
    costs = [draw(st.sampled_from(kinds)) for _ in range(devices * chunks)]
    links = [draw(st.sampled_from([0.0, 0.37, 1.0])) for _ in range(devices)]
    return name, devices, microbatches, costs, links


@given(long_steps(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_step_of_which_part_is_played_takes_what_all_of_it_takes(pipeline, blocking):
    name, devices, microbatches, costs, links = pipeline
    part, whole = (
        simulate_pipeline(
            name,
            costs,
            microbatches,
            num_devices=devices,
            transfer_s=links,
            blocking=blocking,
            timeline=timeline,
        )
        for timeline in (False, True)  # a timeline has every piece
    )
    assert part.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert part.span_s == pytest.approx(whole.span_s, rel=1e-9)
    assert part.busy_s == pytest.approx(whole.busy_s, rel=1e-9)
    assert part.peak_held_bytes == whole.peak_held_bytes
    assert part.peak_in_flight == whole.peak_in_flight


@pytest.mark.parametrize("links", [[0.0] * 8, [0.25] * 8])
def test_alike_devices_repeat_soon(links):
    """With free links from the first microbatch on; else the first device's p microbatches in flight go round together."""
    played = play_repeating("1f1b", unit_costs(8), links, 4096, False)
    assert played.num_left_out == 4096 - 40


def test_a_step_a_little_longer_than_what_is_looked_at_is_not_played_whole():
    """Of 64 microbatches of 8 devices the first 40 tell the rest."""
    assert play_repeating("1f1b", unit_costs(8), [0.25] * 8, 64, False).num_left_out == 24
