"""What the CUDA caching allocator holds when the traced step ends: its segments, totals and settings.

`torch.cuda.memory_snapshot` needs no recording beforehand and no synchronisation. torch's snapshot also names
the settings in force; the environment is not read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memadvisor.capture.allocator import device_used_bytes
from memadvisor.run.allocator_records import AllocatorState, DeviceSegment

_MIB = 2**20
_UNLIMITED_BYTES = 2**62  # max_split_size is the largest 64-bit number where it is not set


@dataclass(frozen=True, slots=True)
class AllocatorSnapshot:
    """One row a segment, and one of totals."""

    segments: list[DeviceSegment]
    state: AllocatorState


def take_snapshot(device: torch.device, step: int, nvml: object | None) -> AllocatorSnapshot | None:
    """The allocator of a CUDA device as it is now; None on CPU, and where torch does not tell."""
    if device.type != "cuda":
        return None
    try:
        snapshot = _snapshot()
        state = allocator_state(
            torch.cuda.memory_stats_as_nested_dict(device),
            settings_in_force(snapshot["allocator_settings"], _memory_fraction(device)),
            step=step,
            time_s=time.monotonic(),
            process_used_bytes=None if nvml is None else _process_used_bytes(nvml),
            device_used_bytes=None if nvml is None else device_used_bytes(nvml),
        )
        return AllocatorSnapshot(segment_rows(snapshot["segments"], device.index, step), state)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None  # another allocator, or another version's snapshot: "not recorded"


def _snapshot() -> dict[str, Any]:
    try:
        # The third item leaves out the traces of a script that records its memory's history.
        return dict(torch._C._cuda_memorySnapshot((0, 0, False)))
    except (TypeError, RuntimeError):  # a version that takes no such tuple
        return dict(torch.cuda.memory._snapshot())


def segment_rows(
    segments: Sequence[Mapping[str, Any]], device_index: int | None, step: int
) -> list[DeviceSegment]:
    """Rows of one device's segments, as `torch.cuda.memory_snapshot` gives them."""
    return [
        DeviceSegment(
            step=step,
            address=segment["address"],
            pool=segment["segment_type"],
            stream=segment["stream"],
            is_expandable=bool(segment.get("is_expandable", False)),
            is_private=tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0),
            total_bytes=segment["total_size"],
            allocated_bytes=segment["allocated_size"],
            active_bytes=segment["active_size"],
            largest_free_bytes=max(
                (block["size"] for block in segment["blocks"] if block["state"] == "inactive"), default=0
            ),
            num_blocks=len(segment["blocks"]),
        )
        for segment in segments
        if device_index is None or segment["device"] == device_index
    ]


def allocator_state(
    stats: Mapping[str, Any],
    settings: str | None,
    *,
    step: int,
    time_s: float,
    process_used_bytes: int | None,
    device_used_bytes: int | None,
) -> AllocatorState:
    """Totals out of `torch.cuda.memory_stats_as_nested_dict`."""
    allocated, active, reserved = (
        stats[name]["all"] for name in ("allocated_bytes", "active_bytes", "reserved_bytes")
    )
    return AllocatorState(
        step=step,
        time_s=time_s,
        allocated_bytes=allocated["current"],
        active_bytes=active["current"],
        reserved_bytes=reserved["current"],
        peak_allocated_bytes=allocated["peak"],
        peak_active_bytes=active["peak"],
        peak_reserved_bytes=reserved["peak"],
        num_retries=stats.get("num_alloc_retries"),
        process_used_bytes=process_used_bytes,
        device_used_bytes=device_used_bytes,
        settings=settings,
    )


def settings_in_force(settings: Mapping[str, Any], memory_fraction: float | None) -> str:
    """torch's settings as one text.

    Two sizes are in no field of their own, only in the text that was last set.
    """
    parts = [
        part
        for part in str(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")).replace(" ", "").split(",")
        if part.startswith(("large_segment_size_mb:", "max_non_split_rounding_mb:"))
    ]
    max_split_bytes = settings["max_split_size"]
    if 0 < max_split_bytes < _UNLIMITED_BYTES:
        parts.append(f"max_split_size_mb:{max_split_bytes // _MIB}")
    divisions = {int(size): int(count) for size, count in settings["roundup_power2_divisions"].items()}
    if any(count > 1 for count in divisions.values()):
        ranges = ",".join(f"{size}:{count}" for size, count in sorted(divisions.items()))
        parts.append(f"roundup_power2_divisions:[{ranges}]")
    if settings["garbage_collection_threshold"]:
        parts.append(f"garbage_collection_threshold:{settings['garbage_collection_threshold']!r}")
    if memory_fraction is not None and 0 < memory_fraction < 1:
        parts.append(f"per_process_memory_fraction:{memory_fraction!r}")
    if settings["expandable_segments"]:
        parts.append("expandable_segments:True")
    return ",".join(parts)


def _memory_fraction(device: torch.device) -> float | None:
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return None if read is None else read(device)


def _process_used_bytes(handle: object) -> int | None:
    """NVML's figure for this process; None where it lists other process ids (containers) or no sizes."""
    import pynvml

    try:
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next(
        (process.usedGpuMemory for process in listed if process.pid == os.getpid() and process.usedGpuMemory),
        None,
    )
