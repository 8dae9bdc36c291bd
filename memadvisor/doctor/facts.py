"""What `memadvisor doctor` sees before it judges. None: could not be seen here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TIME_LIMIT_S = 120.0  # of each process that is started to try something


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The process's surroundings, without torch."""

    python_version: str
    package_versions: Mapping[str, str | None]  # of what memadvisor needs beside torch; None: not installed
    num_cores: int  # that this process may run on
    quota_cores: (
        float | None
    )  # of processor time that its control group allows at once; None: no limit is known
    free_memory_bytes: int | None
    free_shared_memory_bytes: int | None  # /dev/shm: workers of a DataLoader and NCCL talk through it
    directory: str  # where runs would go
    can_write: bool
    free_disk_bytes: int | None
    variables: Mapping[str, str]  # those of ODD_VARIABLES that are set
    driver_version: str | None
    driver_devices: tuple[str, ...]  # GPUs that the driver names, whatever torch makes of them


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A CUDA device as torch sees it."""

    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """torch, as a process of its own found it."""

    version: str
    cuda_version: str | None  # that torch was built for; None: a build for CPU
    devices: tuple[DeviceFacts, ...]
    device_error: str | None  # why no device of a CUDA build can be used
    backends: tuple[str, ...]  # of torch.distributed: "gloo", "nccl"
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """A small training under `memadvisor profile`."""

    num_ranks: int
    exit_code: int | None  # None: it was ended at its time limit
    last_words: str  # of its stderr
    is_same_output: bool | None  # as without memadvisor; None where that was not compared
    peak_bytes: int | None
    unexplained_bytes: int | None
