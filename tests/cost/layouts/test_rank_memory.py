"""What the allocator keeps of a device's memory, and gives up where it would not fit."""

from dataclasses import replace

import pytest

from memadvisor.cost.layouts.rank_memory import StageMemory, within

MEMORY = StageMemory(
    parameter_bytes=10e9, gradient_bytes=0.0, optimizer_bytes=40e9, activation_bytes=0.0, head_bytes=0.0, buffer_bytes=0.0,
    allocator_bytes=5e9, context_bytes=2e9, cached_bytes=20e9,
)  # fmt: skip


def test_where_there_is_room_nothing_is_given_up():
    assert within(MEMORY, 80_000_000_000) == MEMORY


@pytest.mark.parametrize(("device_bytes", "kept"), [(70e9, 13e9), (50e9, 0.0)])
def test_the_device_holds_no_more_than_it_has(device_bytes, kept):
    """57 GB are needed."""
    assert within(MEMORY, int(device_bytes)) == replace(MEMORY, cached_bytes=kept)
