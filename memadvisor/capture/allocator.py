"""What a CUDA device's allocator, NVML and the process say of themselves (the CPU's: cpu_account.py)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from memadvisor.run.records import CUBLAS, CUBLAS_LT, Counter

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")
_WORKSPACE = re.compile(r":(\d+):(\d+)")  # KiB and how many of them, in CUBLAS_WORKSPACE_CONFIG


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


class RunningPeak:
    """The script may read and reset the allocator's running peaks itself, so we never reset them.

    A step has a peak of its own only where it raised the running one.
    """

    def __init__(self) -> None:
        self._allocated_bytes = 0

    def of_step(self, totals: DeviceTotals | None) -> tuple[int | None, int | None]:
        """(allocated, reserved) peaks of the step that has just ended."""
        if totals is None:
            return None, None
        before_bytes, self._allocated_bytes = self._allocated_bytes, totals.peak_allocated_bytes
        peak_bytes = totals.peak_allocated_bytes if totals.peak_allocated_bytes > before_bytes else None
        return peak_bytes, totals.peak_reserved_bytes


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A live block of the caching allocator, which rounds up what it is asked for."""

    size_bytes: int
    requested_bytes: int | None


def device_blocks(device: torch.device) -> dict[int, DeviceBlock]:
    """The live blocks of a CUDA device's caching allocator, by address; none on CPU."""
    if device.type != "cuda":
        return {}
    return {
        block["address"]: DeviceBlock(block["size"], block.get("requested_size"))
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }


def workspace_sizes(device: torch.device) -> dict[int, str]:
    """What each of the workspaces is that torch takes from the caching allocator for cuBLAS and cuBLASLt, and keeps, by its
    bytes: one for each thread's handle and stream (`CublasHandlePool.cpp`; torch can be asked since 2.13)."""
    if hasattr(torch._C, "_cuda_getCublasWorkspaceSize"):
        lt_bytes = torch._C._cuda_getCublasLtWorkspaceSize()
        return {lt_bytes: CUBLAS_LT, torch._C._cuda_getCublasWorkspaceSize(): CUBLAS}
    is_hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    given = _WORKSPACE.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    kib = sum(int(size) * int(count) for size, count in given) or (2**15 if is_hopper else 2 * 4096 + 8 * 16)
    lt_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return {(int(lt_kib) if lt_kib.isdigit() else 2**10) * 2**10: CUBLAS_LT, kib * 2**10: CUBLAS}


def counter(
    time_s: float, allocated_bytes: int | None, totals: DeviceTotals | None, nvml: object | None
) -> Counter:
    """The process's and the device's counters of this moment."""
    return Counter(
        time_s=time_s,
        allocated_bytes=allocated_bytes,
        reserved_bytes=totals.reserved_bytes if totals else None,
        resident_bytes=_resident_bytes(),
        device_used_bytes=device_used_bytes(nvml) if nvml is not None else None,
        device_utilization=_device_utilization(nvml) if nvml is not None else None,
    )


def _resident_bytes() -> int | None:
    try:
        # Ten times a second: the objects that read text take as long again.
        with _STATM.open("rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
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


def device_used_bytes(handle: object) -> int | None:
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
