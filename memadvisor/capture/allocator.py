"""What the allocator and the process say of themselves.

On CPU torch's allocator keeps no account unless the flag behind `caffe2_report_cpu_memory_usage` is
set, and then the profiler's memory events carry its exact total: also for what was allocated before
the profiler ran. The flag is an exported variable of libc10; where it is not, the total is unknown.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from memadvisor.run.records import Counter

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")


def enable_cpu_account() -> bool:
    """Make torch's CPU allocator count from now on; False where this build does not let us."""
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("INFO", "0"):
        return False  # every allocation would be logged to the script's stderr
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):
        return False
    flag.value = True
    return True


def counter(time_s: float, device: torch.device, nvml: object | None = None) -> Counter:
    """The counters of this moment, without synchronising anything."""
    on_cuda = device.type == "cuda"
    return Counter(
        time_s=time_s,
        allocated_bytes=torch.cuda.memory_allocated(device) if on_cuda else None,
        reserved_bytes=torch.cuda.memory_reserved(device) if on_cuda else None,
        resident_bytes=_resident_bytes(),
        device_used_bytes=_device_used_bytes(nvml) if nvml is not None else None,
        device_utilization=None,
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
