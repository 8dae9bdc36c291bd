"""Reserved beyond allocated: by segment, by what pins it, and as the replay predicts it."""

import dataclasses

import pytest

from memadvisor.analyzers.fragmentation import allocator_settings, fragmentation
from memadvisor.cost.allocator_settings import MIB
from tests.cuda_run import cuda_run, pinning
from tests.make_run import make_run


def test_what_is_reserved_is_accounted_for_to_the_byte():
    found = fragmentation(cuda_run(state={"process_used_bytes": 560 * MIB}).ranks[0]).measured

    pending = found.active_bytes - found.allocated_bytes
    total = found.allocated_bytes + pending + found.pinned_free_bytes + found.cached_bytes
    assert total == found.reserved_bytes
    assert (found.pinned_free_bytes, found.cached_bytes) == (12 * MIB, 10 * MIB)
    assert found.fragmentation_bytes == 24 * MIB
    assert found.outside_allocator_bytes == 500 * MIB  # NVML's figure less what is reserved


def test_a_segment_names_the_live_storages_that_pin_it():
    rank = cuda_run().ranks[0]
    [use] = fragmentation(rank).measured.segments  # full and free ones are no fragmentation

    assert (use.free_bytes, use.largest_free_bytes) == (12 * MIB, 7 * MIB)
    alive = {(row.category, row.module) for row in pinning(rank)}
    assert {(pin.category, pin.module) for pin in use.pinned_by} == alive
    assert sum(pin.size_bytes for pin in use.pinned_by) == sum(row.size_bytes for row in pinning(rank))


def test_what_nobody_recorded_is_none_and_a_cpu_run_is_only_predicted():
    rank = make_run(num_ranks=1).ranks[0]
    found = fragmentation(rank)

    assert found.measured is None and found.error_fraction is None
    assert found.is_for_other_device
    assert found.predicted_reserved_bytes >= found.predicted_allocated_bytes
    assert found.predicted_allocated_bytes >= rank.traced_step.peak_allocated_bytes
    assert found.predicted_reserved_bytes % (2 * MIB) == 0
    assert not found.is_worth_showing  # a few MiB

    untraced = dataclasses.replace(rank, steps=tuple(s for s in rank.steps if not s.traced))
    assert fragmentation(untraced) is None
    assert fragmentation(cuda_run().ranks[0]).measured.outside_allocator_bytes is None


def test_the_settings_in_force_decide_what_is_predicted():
    """Segments of 64 MiB instead of 20: the last one is less full."""
    settings = "large_segment_size_mb:64"
    plain = fragmentation(cuda_run(hidden=512).ranks[0])
    larger = fragmentation(cuda_run(hidden=512, state={"settings": settings}).ranks[0])

    assert larger.settings == settings
    assert larger.predicted_reserved_bytes != plain.predicted_reserved_bytes
    assert plain.error_fraction == pytest.approx(plain.predicted_reserved_bytes / (60 * MIB) - 1)


@pytest.mark.parametrize(
    ("version", "orders_by_address"), [("2.11.0+cu130", True), ("2.12.0", True), ("2.13.0+cu130", False), ("2.14.1", False)]
)  # fmt: skip
def test_torch_before_2_13_takes_the_free_block_of_the_lowest_address(version, orders_by_address):
    rank = cuda_run().ranks[0]
    rank = dataclasses.replace(rank, process=dataclasses.replace(rank.process, torch_version=version))

    assert allocator_settings(rank).orders_by_address is orders_by_address


def test_settings_of_a_later_torch_are_replayed_as_the_defaults():
    found = fragmentation(cuda_run(state={"settings": "a_new_option:1"}).ranks[0])
    plain = fragmentation(cuda_run().ranks[0])

    assert found.predicted_reserved_bytes == plain.predicted_reserved_bytes
