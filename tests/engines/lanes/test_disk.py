"""Blocks on disk hold what was written to them, share nothing, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import resource
import stat
import time
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memadvisor.engines.lanes.disk import ALIGNMENT_BYTES, DiskFile
from memadvisor.engines.lanes.transfers import moved_within
from memadvisor.errors import UsageError


@pytest.fixture
def disk(tmp_path):
    disk = DiskFile(tmp_path)
    yield disk
    disk.close()


@settings(max_examples=30, deadline=None)
@example(actions=[(1, 1), (1, 0), (0, 0), (0, 0), (1, 4097)])  # of no bytes, at the end of the file
@given(actions=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5 * ALIGNMENT_BYTES)), max_size=30))
def test_blocks_in_use_never_overlap_and_all_room_is_reused(tmp_path_factory, actions):
    disk = DiskFile(tmp_path_factory.getbasetemp())
    used, most = [], 0
    for which, size in actions:
        if which == 0 and used:
            disk.free(used.pop(size % len(used)))
        else:
            used.append(disk.allocate(size))
            assert size <= used[-1].size_bytes < size + ALIGNMENT_BYTES
        ends = [(block.offset, block.offset + block.size_bytes) for block in sorted(used)]
        assert all(end <= first for (_, end), (first, _) in pairwise(ends))
        assert disk.used_bytes == sum(block.size_bytes for block in used)
        most = max(most, disk.size_bytes)
    for block in used:
        disk.free(block)
    assert disk.allocate(most).offset == 0 and disk.size_bytes == most  # all of it is one stretch again
    disk.close()


def test_what_was_written_is_read_again_beside_other_transfers(disk):
    tensors = [torch.randn(3, 1000 + number) for number in range(8)] + [torch.zeros(0)]
    blocks = [disk.allocate(tensor.nbytes) for tensor in tensors]
    written = [disk.write(block, tensor) for block, tensor in zip(blocks, tensors, strict=True)]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    for block, target, ticket in zip(blocks, targets, written, strict=True):
        disk.read(block, target, after=[ticket]).wait()
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors, strict=True))


def test_the_file_has_no_name_and_is_its_owners_alone(disk, tmp_path):
    disk.write(disk.allocate(10), torch.zeros(10, dtype=torch.uint8)).wait()
    found = os.fstat(disk._file.fileno())
    assert list(tmp_path.iterdir()) == [] and found.st_nlink == 0 and stat.S_IMODE(found.st_mode) == 0o600


def test_a_full_disk_is_told_to_who_waits_and_to_nobody_else(disk):
    small, large = torch.ones(1000, dtype=torch.uint8), torch.ones(10**6, dtype=torch.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    blocks = [disk.allocate(tensor.nbytes) for tensor in (small, large, small)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 10**5, hard))  # what a file may grow to
    try:
        first = disk.write(blocks[0], small)
        failed = disk.write(blocks[1], large)
        with pytest.raises(OSError, match="too large"):
            failed.wait()
        first.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    disk.write(blocks[2], small).wait()  # what was broken is over


def test_a_directory_that_cannot_hold_a_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="No file can be made"):
        DiskFile(tmp_path / "missing")


def test_a_forked_process_has_a_file_of_its_own(disk):
    block = disk.allocate(8)
    disk.write(block, torch.ones(8, dtype=torch.uint8)).wait()
    child = os.fork()
    if child == 0:
        own = disk.allocate(8)
        disk.write(own, torch.zeros(8, dtype=torch.uint8)).wait()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    target = torch.zeros(8, dtype=torch.uint8)
    disk.read(block, target).wait()
    assert target.tolist() == [1] * 8


def test_a_file_that_nobody_has_any_more_is_closed_without_a_warning(tmp_path):
    """Python, asked to (-X dev), would warn the script of a file that is not its own."""
    disk = DiskFile(tmp_path)
    number = disk._file.fileno()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del disk
        gc.collect()

    assert not [each for each in warned if f"name={number} " in str(each.message)]
    with pytest.raises(OSError):
        os.fstat(number)


def test_transfers_leave_when_they_were_done_and_failed_ones_do_not(disk):
    start_s = time.monotonic()
    tensor = torch.arange(1000, dtype=torch.float32)
    block = disk.allocate(tensor.nbytes)
    written = disk.write(block, tensor)
    disk.read(block, torch.empty_like(tensor), after=[written]).wait()
    with pytest.raises(OSError, match="shorter"):
        disk.read(disk.allocate(8), torch.empty(8, dtype=torch.uint8)).wait()
    found = moved_within(start_s, time.monotonic())

    assert [(each.lane, each.kind, each.size_bytes) for each in found] == [
        ("disk", "write", 4000),
        ("disk", "read", 4000),
    ]
    assert found[0].end_s <= found[1].start_s
    assert moved_within(start_s, found[1].start_s) == found[:1]
