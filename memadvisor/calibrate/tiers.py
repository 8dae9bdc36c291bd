"""How fast bytes come from and go to the tiers outside of the memory that computes: a disk, and a GPU's host."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch

from memadvisor.hardware.hardware import TierBandwidth

_DISK_BYTES = 256 * 2**20
_PIECE_BYTES = 16 * 2**20
_HOST_BYTES = 64 * 2**20
_NUM_RUNS = 5


def measure_disk(size_bytes: int = _DISK_BYTES) -> TierBandwidth | None:
    """A new file in the directory for temporary ones: written until it is on the disk, read when no cache has it.

    None where there is no room for it, or where nothing is written to a disk (tmpfs).
    """
    piece = os.urandom(min(_PIECE_BYTES, size_bytes))
    num_pieces = max(1, size_bytes // len(piece))
    try:
        with tempfile.TemporaryFile(prefix="memadvisor-", buffering=0) as file:
            number = file.fileno()
            start_s = time.perf_counter()
            for place in range(num_pieces):
                _write(number, piece, place * len(piece))
            os.fdatasync(number)
            written_s = time.perf_counter() - start_s
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            target = bytearray(len(piece))
            start_s = time.perf_counter()
            for place in range(num_pieces):
                os.preadv(number, [target], place * len(piece))
            read_s = time.perf_counter() - start_s
    except OSError:
        return None
    size_bytes = num_pieces * len(piece)
    return TierBandwidth(read_bytes_per_s=size_bytes / read_s, write_bytes_per_s=size_bytes / written_s)


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


def _seconds(copy: Callable[[], object], device: torch.device) -> float:
    copy()  # the first one sets up what later ones use
    durations = []
    for _ in range(_NUM_RUNS):
        torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        copy()
        torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start_s)
    return median(durations)
