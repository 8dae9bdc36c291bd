"""What a profiled process leaves behind of its allocators: segments, their state, and what was alive when one failed.

As in records.py each class is one table of the journal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSegment:
    """Memory that the CUDA caching allocator holds in one piece, when the traced step ends.

    `pool` is small (requests up to 1 MiB) or large; `is_private`: a CUDA graph's own. Active bytes are allocated,
    or freed and still used by another stream; the rest is free, `largest_free_bytes` of it in one block.
    """

    step: int
    address: int
    pool: str
    stream: int
    is_expandable: bool
    is_private: bool
    total_bytes: int
    allocated_bytes: int
    active_bytes: int
    largest_free_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AllocatorState:
    """The CUDA caching allocator's own totals when the traced step ends; peaks since the script last reset them.

    `process_used_bytes` and `device_used_bytes` are NVML's, of this process alone and of all. `settings` are
    those in force, as PYTORCH_CUDA_ALLOC_CONF writes them; empty: torch's defaults.
    """

    step: int
    time_s: float
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    num_retries: int | None  # allocations that had to release cached memory first, in the whole run
    process_used_bytes: int | None
    device_used_bytes: int | None
    settings: str | None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed, and where the training stood.

    `requested_bytes` is what was asked for, the rest are the totals just before. `limit_bytes` is what the process
    may have, and `limit` says who sets it: `--memory-limit`, `device` or `host`. `basis` says what the storages of
    the event stand on: `operators` (all that operators made), `trace` (a traced step's account), or `known`
    (parameters, gradients, optimizer state and buffers alone).
    """

    event: int
    time_s: float
    step: int | None
    phase: str
    module: str
    unit: str
    micro_batch: int
    operator: str
    requested_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    limit_bytes: int | None
    limit: str
    basis: str


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage that was alive when memory ran out, or several small ones of one place together."""

    event: int
    size_bytes: int
    num_storages: int
    category: str
    module: str
    unit: str
    phase: str
    operator: str
    dtype: str
    shape: str
