"""What the allocator and the process say of themselves.

On CPU torch's allocator keeps no account unless the flag behind `caffe2_report_cpu_memory_usage` is
set, and then the profiler's memory events carry its exact total: also for what was allocated before
the profiler ran. The flag is an exported variable of libc10; where it is not, the total is unknown.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
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
