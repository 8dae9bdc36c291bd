"""What the allocator and the process say of themselves.

On CPU torch's allocator keeps no account unless the flag behind `caffe2_report_cpu_memory_usage` is
set, and then the profiler's memory events carry its exact total: also for what was allocated before
the profiler ran. The flag is an exported variable of libc10; where it is not, the total is unknown.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from memadvisor.run.records import Counter

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# c10::profiledCPUMemoryReporter() and ProfiledCPUMemoryReporter::New(void*, size_t)
_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
_NEW = "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm"
_STATM = Path("/proc/self/statm")


def enable_cpu_account(alive: Iterable[tuple[int, int]]) -> bool:
    """Make torch's CPU allocator count from now on; False where this build does not let us.

    `alive` are (address, bytes) of the blocks that are there already: the allocator is told of them, or it
    would neither count them nor, when they are freed, know their size (and say so on stderr).
    """
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("INFO", "0"):
        return False  # every allocation would be logged to the script's stderr
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
        reporter_of, note_new = getattr(library, _REPORTER), getattr(library, _NEW)
    except (OSError, ValueError, AttributeError):
        return False
    if flag.value:
        return True  # an earlier recorder, or the script, has switched it on
    flag.value = True
    reporter_of.restype, note_new.restype = ctypes.c_void_p, None
    note_new.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    reporter = reporter_of()
    for address, size_bytes in alive:
        note_new(reporter, address, size_bytes)
    return True


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """The caching allocator's own totals; peaks are since the script last reset them."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def device_totals(device: torch.device) -> DeviceTotals | None:
    """Totals of a CUDA device, without synchronising anything; None on CPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return DeviceTotals(allocated["current"], reserved["current"], allocated["peak"], reserved["peak"])


def device_block_sizes(device: torch.device) -> dict[int, int]:
    """Bytes that the caching allocator really gave to each live block of a CUDA device, by address."""
    if device.type != "cuda":
        return {}
    return {
        block["address"]: block["size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }


def counter(time_s: float, totals: DeviceTotals | None, nvml: object | None) -> Counter:
    """The process's and the device's counters of this moment."""
    return Counter(
        time_s=time_s,
        allocated_bytes=totals.allocated_bytes if totals else None,
        reserved_bytes=totals.reserved_bytes if totals else None,
        resident_bytes=_resident_bytes(),
        device_used_bytes=_device_used_bytes(nvml) if nvml is not None else None,
        device_utilization=_device_utilization(nvml) if nvml is not None else None,
    )


def _resident_bytes() -> int | None:
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def open_nvml(device: torch.device) -> object | None:
    """NVML's handle of the device, or None where there is no NVML."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)  # type: ignore[no-any-return]
    except Exception:
        return None  # no driver, no permission, an odd UUID: the counter stays "not recorded"


def _device_used_bytes(handle: object) -> int | None:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None


def _device_utilization(handle: object) -> float | None:
    """Share of the last sampling period in which a kernel ran, as a fraction of 1."""
    import pynvml

    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        return None
