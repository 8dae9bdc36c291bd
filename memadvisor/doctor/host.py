"""Facts about the host, read without torch."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from memadvisor.doctor.facts import HostFacts
from memadvisor.doctor.findings import ODD_VARIABLES
from memadvisor.hardware.host_memory import control_groups, free_host_bytes

# Beside torch: pyproject.toml's list.
PACKAGES = ("numpy", "nvidia-ml-py", "rich", "textual", "plotly", "pandas", "scipy")
_SHARED_MEMORY = Path("/dev/shm")


def host_facts(directory: Path) -> HostFacts:
    """`directory`: where runs would go."""
    driver_version, driver_devices = _driver()
    return HostFacts(
        python_version=platform.python_version(),
        package_versions={name: _version(name) for name in PACKAGES},
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota_cores=quota_cores(),
        free_memory_bytes=free_host_bytes(),
        free_shared_memory_bytes=_free_bytes(_SHARED_MEMORY),
        directory=str(directory),
        can_write=os.access(directory, os.W_OK | os.X_OK),
        free_disk_bytes=_free_bytes(directory),
        variables={name: os.environ[name] for name in ODD_VARIABLES if name in os.environ},
        driver_version=driver_version,
        driver_devices=driver_devices,
    )


def quota_cores(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups (version 2, `cpu.max`) give this process; None: no limit known."""
    limits = [_quota(group) for group in control_groups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(group: Path) -> float | None:
    try:
        allowed, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _free_bytes(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def _driver() -> tuple[str | None, tuple[str, ...]]:
    """The NVIDIA driver's version and devices, by NVML; (None, ()) where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, no permission: all mean that none can be asked
        return None, ()
    try:
        handles = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
        return str(pynvml.nvmlSystemGetDriverVersion()), tuple(map(pynvml.nvmlDeviceGetName, handles))
    except pynvml.NVMLError:
        return None, ()
    finally:
        pynvml.nvmlShutdown()
