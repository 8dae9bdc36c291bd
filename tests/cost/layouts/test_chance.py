from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.layouts.chance import (
    chance_beyond,
    chance_of_more,
    memory_sigma,
    room_bytes,
    safe_peak_bytes,
)
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.rank_memory import StageMemory


def test_states_are_known_better_than_activations():
    """Of two equal peaks below the capacity the one that is all states is the safer one."""
    empty = StageMemory(
        parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0, activation_bytes=0, head_bytes=0, buffer_bytes=0,
        allocator_bytes=0, context_bytes=1e9,
    )  # fmt: skip
    chances = [
        chance_of_more(replace(empty, optimizer_bytes=states, activation_bytes=70e9 - states), 81e9, FITTED)
        for states in (70e9, 35e9, 0.0)
    ]
    assert chances[0] < 0.01 and chances == sorted(chances) and chances[-1] > 0.2


@given(st.floats(0.0, 70e9), st.floats(10e9, 200e9), st.floats(0.001, 0.5))
def test_the_largest_safe_peak_has_the_chance_that_is_accepted(states_bytes, left_bytes, max_p_oom):
    peak = safe_peak_bytes(states_bytes, left_bytes, max_p_oom, FITTED)
    tensors = (peak - FITTED.allocator_fixed_bytes) / FITTED.allocator_share
    sigma = memory_sigma(min(1.0, states_bytes / tensors), FITTED)
    assert chance_beyond(peak, left_bytes, sigma) == pytest.approx(max_p_oom, rel=1e-3)


@given(st.sampled_from([11e9, 24e9, 80e9]), st.integers(0, 5), st.floats(0.3, 1.2))
def test_what_is_said_to_fit_is_with_its_context_no_more_than_the_card_has(
    capacity_bytes, communicators, share
):
    """A card has 1.06 of what its sheet says."""
    memory = StageMemory(
        parameter_bytes=0, gradient_bytes=0, optimizer_bytes=share * capacity_bytes, activation_bytes=0, head_bytes=0, buffer_bytes=0,
        allocator_bytes=0, context_bytes=FITTED.driver_bytes + communicators * FITTED.communicator_bytes,
    )  # fmt: skip
    if chance_of_more(memory, capacity_bytes, FITTED) < 0.1:
        assert memory.total_bytes <= 1.06 * capacity_bytes


def test_a_job_without_communicators_may_have_more_of_its_card():
    """A gigabyte is left to the driver, where two are to both."""
    alone, together = (
        StageMemory(
            parameter_bytes=21e9, gradient_bytes=0, optimizer_bytes=0, activation_bytes=0, head_bytes=0, buffer_bytes=0,
            allocator_bytes=0, context_bytes=FITTED.driver_bytes + communicators * FITTED.communicator_bytes,
        )
        for communicators in (0, 1)
    )  # fmt: skip
    assert room_bytes(alone, 24e9, FITTED) == 23e9
    assert room_bytes(together, 24e9, FITTED) == 22e9
    assert chance_of_more(alone, 24e9, FITTED) < 0.05 < 0.15 < chance_of_more(together, 24e9, FITTED)
