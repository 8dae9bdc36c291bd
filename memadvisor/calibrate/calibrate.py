"""Measure this machine: products by shape and dtype, memory, collectives and what they cost compute, transfers, AdamW."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from memadvisor.calibrate.arithmetic import (
    measure_bandwidth,
    measure_matmuls,
    measure_optimizers,
    peak_flops,
)
from memadvisor.calibrate.both_ways import measure_both_ways_of_files, measure_both_ways_of_host
from memadvisor.calibrate.links import SIZES_BYTES, measure_collectives
from memadvisor.calibrate.tiers import measure_coder, measure_disk, measure_host, measure_page_cache
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware


def calibrate(
    num_ranks: int | None = None,
    *,
    directory: Path | None = None,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
) -> Hardware:
    """Hardware of kind `measured`. One rank measures no collectives; None means all devices, or 2 on CPU.

    `directory`: on the disk that is measured; None: the working directory, as runs go there. Raises UsageError.
    """
    directory = Path.cwd() if directory is None else directory
    if not os.access(directory, os.W_OK | os.X_OK) or not directory.is_dir():
        raise UsageError(
            f"--disk {str(directory)!r} is no directory that files can be made in.",
            hint="name one on the disk that plans should use.",
        )
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    if num_ranks is None:
        num_ranks = torch.cuda.device_count() if on_cuda else 2
    if num_ranks < 1:
        raise UsageError(f"--ranks {num_ranks} is no number of processes.", hint="give 1 or more.")
    if on_cuda and num_ranks > torch.cuda.device_count():
        raise UsageError(
            f"--ranks {num_ranks} needs as many CUDA devices, and there are {torch.cuda.device_count()}.",
            hint="leave --ranks out to use all devices.",
        )
    curves, alternatives, overlap = (
        measure_collectives(device.type, num_ranks, sizes_bytes=sizes_bytes)
        if num_ranks > 1
        else ((), (), None)
    )
    matmuls = measure_matmuls(device)
    disk_both_ways, cache_both_ways = measure_both_ways_of_files(directory)
    return Hardware(
        name=_device_name(device),
        kind="measured",
        source=f"memadvisor calibrate, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
        memory_bytes=_memory_bytes(device),
        memory_bandwidth_bytes_per_s=measure_bandwidth(device),
        peak_flops_per_s=peak_flops(matmuls),
        matmuls=matmuls,
        optimizers=measure_optimizers(device),
        collectives=curves,
        alternatives=alternatives,
        disk=measure_disk(directory),
        page_cache=measure_page_cache(directory),
        host=measure_host(device),
        coder=measure_coder(device),
        overlap=overlap,
        disk_both_ways=disk_both_ways,
        page_cache_both_ways=cache_both_ways,
        host_both_ways=measure_both_ways_of_host(device),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() or "cpu"


def _memory_bytes(device: torch.device) -> int | None:
    """A CPU process's share of the machine's memory is nobody's figure, so it stays unknown."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
