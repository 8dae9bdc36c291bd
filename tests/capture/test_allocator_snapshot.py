"""Rows of what torch's CUDA allocator says of itself, from snapshots of the form that torch documents."""

import pytest
import torch

from memadvisor.capture.allocator_snapshot import (
    allocator_state,
    segment_rows,
    settings_in_force,
    take_snapshot,
)
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings, parse_allocator_settings

DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": 2**63 - 1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "roundup_power2_divisions": {str(2**i): 0 for i in range(16)},
}


def segment(device, *blocks, **more):
    sizes = {state: sum(size for size, s in blocks if s == state) for _, state in blocks}
    return {
        "device": device,
        "address": 4096,
        "segment_type": "large",
        "stream": 0,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sizes.get("active_allocated", 0),
        "active_size": sizes.get("active_allocated", 0) + sizes.get("active_awaiting_free", 0),
        "blocks": [{"size": size, "state": state, "address": 0} for size, state in blocks],
        **more,
    }


def test_a_segment_becomes_a_row_with_its_largest_free_block():
    blocks = ((8, "active_allocated"), (5, "inactive"), (3, "active_awaiting_free"), (4, "inactive"))
    other_device = segment(1, (9, "inactive"))
    [row] = segment_rows([segment(0, *blocks, is_expandable=True), other_device], 0, step=2)

    assert (row.total_bytes, row.allocated_bytes, row.active_bytes, row.largest_free_bytes) == (20, 8, 11, 5)
    assert (row.step, row.num_blocks, row.is_expandable, row.is_private) == (2, 4, True, False)
    [graph] = segment_rows([segment(0, (9, "inactive"), segment_pool_id=(0, 1))], 0, step=2)
    assert graph.is_private


def test_totals_keep_allocated_active_and_reserved_apart():
    stats = {
        "allocated_bytes": {"all": {"current": 1, "peak": 10}},
        "active_bytes": {"all": {"current": 2, "peak": 20}},
        "reserved_bytes": {"all": {"current": 3, "peak": 30}},
        "num_alloc_retries": 4,
    }
    state = allocator_state(stats, "", step=2, time_s=1.0, process_used_bytes=None, device_used_bytes=50)

    assert (state.allocated_bytes, state.active_bytes, state.reserved_bytes) == (1, 2, 3)
    assert (state.peak_allocated_bytes, state.peak_active_bytes, state.peak_reserved_bytes) == (10, 20, 30)
    assert (state.num_retries, state.process_used_bytes, state.device_used_bytes) == (4, None, 50)


def test_settings_in_force_are_read_back_by_the_simulator():
    in_force = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:40, max_split_size_mb:64,expandable_segments:True",
        "max_split_size": 64 * MIB,
        "garbage_collection_threshold": 0.75,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(2**i): 4 if i > 7 else 1 for i in range(16)},
    }
    read = parse_allocator_settings(settings_in_force(in_force, 0.5))

    assert read == AllocatorSettings(
        max_split_size_bytes=64 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        roundup_power2_divisions=(1,) * 8 + (4,) * 8,
        garbage_collection_threshold=0.75,
        expandable_segments=True,
        memory_fraction=0.5,
    )
    assert settings_in_force(DEFAULTS, 1.0) == ""


def test_on_cpu_there_is_nothing_to_take():
    assert take_snapshot(torch.device("cpu"), 2, None) is None


def test_another_versions_snapshot_is_not_recorded(monkeypatch):
    """No failure of ours reaches the recorder."""
    monkeypatch.setattr("memadvisor.capture.allocator_snapshot._snapshot", lambda: {"segments": []})
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})

    assert take_snapshot(torch.device("cuda:0"), 2, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_sum_to_the_allocators_own_totals():
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    snapshot = take_snapshot(kept.device, 2, None)

    assert snapshot.state.allocated_bytes == torch.cuda.memory_allocated()
    assert snapshot.state.reserved_bytes == torch.cuda.memory_reserved()
    assert sum(row.total_bytes for row in snapshot.segments) == torch.cuda.memory_reserved()
    assert sum(row.allocated_bytes for row in snapshot.segments) == torch.cuda.memory_allocated()
