"""How fast bytes come from and go to the tiers outside of the memory that computes: a disk, and a GPU's host.

And how fast optimizer state is coded, which is a tier in that memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from memadvisor.coded_states import coded_bytes
from memadvisor.engines.lanes.dynamic_code import DynamicCode
from memadvisor.hardware.hardware import PageCache, TierBandwidth
from memadvisor.hardware.host_memory import free_host_bytes

_DISK_BYTES = 256 * 2**20
_PIECE_BYTES = 16 * 2**20
_HOST_BYTES = 64 * 2**20
_CODED_ELEMENTS = 2**22
_NUM_RUNS = 5


def measure_disk(directory: Path, size_bytes: int = _DISK_BYTES) -> TierBandwidth | None:
    """A new file without a name in the directory: written until it is on the disk, read when no cache has it.

    None where there is no room for it.
    """
    piece = os.urandom(min(_PIECE_BYTES, size_bytes))
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            written_s = _written_s(file.fileno(), piece, size_bytes, until_there=True)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _read_s(file.fileno(), piece, size_bytes)
    except OSError:
        return None
    return TierBandwidth(read_bytes_per_s=size_bytes / read_s, write_bytes_per_s=size_bytes / written_s)


def measure_page_cache(directory: Path, size_bytes: int = _DISK_BYTES) -> PageCache | None:
    """The same of a file that has just been written, and stays in the kernel's memory.

    None where there is no room for it, or the kernel does not tell how much memory is free.
    """
    piece = os.urandom(min(_PIECE_BYTES, size_bytes))
    free_bytes = free_host_bytes()
    if free_bytes is None:
        return None
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            _written_s(file.fileno(), piece, size_bytes)
            written_s = median(_written_s(file.fileno(), piece, size_bytes) for _ in range(3))
            read_s = median(_read_s(file.fileno(), piece, size_bytes) for _ in range(3))
    except (OSError, ValueError):
        return None
    bandwidth = TierBandwidth(read_bytes_per_s=size_bytes / read_s, write_bytes_per_s=size_bytes / written_s)
    return PageCache(bandwidth=bandwidth, size_bytes=free_bytes)


def _written_s(number: int, piece: bytes, size_bytes: int, *, until_there: bool = False) -> float:
    start_s = time.perf_counter()
    for offset in range(0, size_bytes, len(piece)):
        _write(number, piece, offset)
    if until_there:
        os.fdatasync(number)
    return time.perf_counter() - start_s


def _read_s(number: int, piece: bytes, size_bytes: int) -> float:
    target = bytearray(len(piece))
    start_s = time.perf_counter()
    for offset in range(0, size_bytes, len(piece)):
        os.preadv(number, [target], offset)
    return time.perf_counter() - start_s


def _write(number: int, piece: bytes, offset: int) -> None:
    view = memoryview(piece)
    while view:
        done = os.pwrite(number, view, offset)
        view, offset = view[done:], offset + done


def measure_host(device: torch.device) -> TierBandwidth | None:
    """Copies between a GPU and pinned memory, in each direction by itself; None on a CPU. Not verified on a GPU."""
    if device.type != "cuda":
        return None
    on_host = torch.empty(_HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(_HOST_BYTES, dtype=torch.uint8, device=device)
    return TierBandwidth(
        read_bytes_per_s=_HOST_BYTES / _seconds(lambda: on_device.copy_(on_host, non_blocking=True), device),
        write_bytes_per_s=_HOST_BYTES / _seconds(lambda: on_host.copy_(on_device, non_blocking=True), device),
    )


def measure_coder(device: torch.device) -> TierBandwidth:
    """Optimizer state that is decoded from 8 bits an element, and coded, as the engine does it; not verified on a GPU."""
    code, values = DynamicCode(device), torch.randn(_CODED_ELEMENTS, device=device)
    coded = torch.empty(coded_bytes(_CODED_ELEMENTS), dtype=torch.uint8, device=device)
    code.encode(values, coded)
    return TierBandwidth(
        read_bytes_per_s=values.nbytes / _seconds(lambda: code.decode(coded, values), device),
        write_bytes_per_s=values.nbytes / _seconds(lambda: code.encode(values, coded), device),
    )


def _seconds(copy: Callable[[], object], device: torch.device) -> float:
    copy()  # the first one sets up what later ones use
    durations = []
    for _ in range(_NUM_RUNS):
        _finish(device)
        start_s = time.perf_counter()
        copy()
        _finish(device)
        durations.append(time.perf_counter() - start_s)
    return median(durations)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
