"""How fast bytes go in either direction while others go in the other one, as when a plan fetches and puts away at once."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch

from memadvisor.hardware.hardware import TierBandwidth

_FILE_BYTES = 128 * 2**20
_PIECE_BYTES = 8 * 2**20
_HOST_BYTES = 64 * 2**20
_NUM_RUNS = 5


def measure_both_ways_of_files(
    directory: Path, size_bytes: int = _FILE_BYTES
) -> tuple[TierBandwidth | None, TierBandwidth | None]:
    """Of the disk, and of files that the kernel keeps in memory: one file is read while another is written.

    None where there is no room for them. Files have no names and are gone at once.
    """
    piece = os.urandom(min(_PIECE_BYTES, size_bytes))
    try:
        with (
            tempfile.TemporaryFile(dir=directory, buffering=0) as read,
            tempfile.TemporaryFile(dir=directory, buffering=0) as written,
        ):
            for file in (read, written):
                _write(file.fileno(), piece, size_bytes)
                os.fdatasync(file.fileno())
            cached = _at_once(read.fileno(), written.fileno(), piece, size_bytes, until_there=False)
            if not hasattr(os, "posix_fadvise"):
                return None, cached
            os.fdatasync(written.fileno())
            os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _at_once(read.fileno(), written.fileno(), piece, size_bytes, until_there=True), cached
    except OSError:
        return None, None


def _at_once(read: int, written: int, piece: bytes, size_bytes: int, *, until_there: bool) -> TierBandwidth:
    taken_s: dict[str, float] = {}

    def write() -> None:
        start_s = time.perf_counter()
        _write(written, piece, size_bytes)
        if until_there:
            os.fdatasync(written)
        taken_s["write"] = time.perf_counter() - start_s

    writer = threading.Thread(target=write)
    target = bytearray(len(piece))
    writer.start()
    start_s = time.perf_counter()
    for offset in range(0, size_bytes, len(piece)):
        os.preadv(read, [target], offset)
    read_s = time.perf_counter() - start_s
    writer.join()
    if "write" not in taken_s:
        raise OSError("the file could not be written")
    return TierBandwidth(
        read_bytes_per_s=size_bytes / read_s, write_bytes_per_s=size_bytes / taken_s["write"]
    )


def _write(number: int, piece: bytes, size_bytes: int) -> None:
    for offset in range(0, size_bytes, len(piece)):
        view = memoryview(piece)
        while view:
            done = os.pwrite(number, view, offset)
            view, offset = view[done:], offset + done


def measure_both_ways_of_host(device: torch.device) -> TierBandwidth | None:
    """Copies between a GPU and pinned memory, both ways on streams of their own; None on a CPU. Not verified on a GPU."""
    if device.type != "cuda":
        return None
    pairs = [
        (
            torch.empty(_HOST_BYTES, dtype=torch.uint8, pin_memory=True),
            torch.empty(_HOST_BYTES, dtype=torch.uint8, device=device),
        )
        for _ in range(2)
    ]
    streams = [torch.cuda.Stream(device) for _ in pairs]  # type: ignore[no-untyped-call]  # torch has no types for it
    durations: tuple[list[float], list[float]] = ([], [])
    for _ in range(_NUM_RUNS + 1):
        events = [[_event() for _ in range(2)] for _ in pairs]
        torch.cuda.synchronize(device)
        for way, ((on_host, on_device), stream, (start, end)) in enumerate(
            zip(pairs, streams, events, strict=True)
        ):
            with torch.cuda.stream(stream):
                start.record(stream)
                for _ in range(4):  # long enough for the other one to be under way
                    (on_host if way else on_device).copy_(on_device if way else on_host, non_blocking=True)
                end.record(stream)
        torch.cuda.synchronize(device)
        for taken, (start, end) in zip(durations, events, strict=True):
            taken.append(start.elapsed_time(end) / 1e3 / 4)
    # The first run sets up what later ones use.
    read_s, write_s = (median(taken[1:]) for taken in durations)
    return TierBandwidth(read_bytes_per_s=_HOST_BYTES / read_s, write_bytes_per_s=_HOST_BYTES / write_s)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
