"""How long this machine's collectives take against message size, measured among processes of its own.

Gloo on CPU, NCCL on CUDA with one process a device. A point is the median of repeated runs, each from
the moment all ranks are ready to the moment the last is done.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from memadvisor.calibrate.messages import exchange
from memadvisor.calibrate.overlap import MESSAGE_BYTES, measure_overlap
from memadvisor.engines.collectives.exchanges import (
    gather_by_doubling,
    gather_pairwise,
    reduce_pairwise,
    reduce_together,
)
from memadvisor.engines.collectives.native import all_gather, reduce_scatter
from memadvisor.errors import MemadvisorError
from memadvisor.executors import can_double
from memadvisor.hardware.hardware import CollectiveCurve, OverlapSlowdown
from memadvisor.hardware.pieces import fit_pieces
from memadvisor.run.helpers import end_with_parent, started

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
_BY_DOUBLING = "all_gather by doubling"
_TOGETHER = "reduce_scatter by together"
SIZES_BYTES = tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24, 26))
_TURNS_PER_S = 75  # of the budget; they take some two fifths of it
_TIMEOUT = datetime.timedelta(seconds=60)


def measure_collectives(
    device_type: str,
    num_ranks: int,
    *,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    budget_s: float = 20.0,
) -> tuple[tuple[CollectiveCurve, ...], tuple[CollectiveCurve, ...], OverlapSlowdown]:
    """Start `num_ranks` processes and measure: curves, those of other algorithms, and what overlap costs. Raises
    MemadvisorError when they cannot talk."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="memadvisor-") as directory:
        arguments = (directory, device_type, num_ranks, sizes_bytes, budget_s)
        processes = [
            context.Process(target=_rank_main, args=(rank, *arguments), daemon=True)
            for rank in range(num_ranks)
        ]
        limit_s = budget_s + _TIMEOUT.total_seconds()
        with started(processes):
            is_in_time = _join(processes, limit_s)
        result = Path(directory) / "durations.json"
        if not result.exists() and not is_in_time:
            raise MemadvisorError(
                f"{num_ranks} processes did not measure their collectives within {limit_s:.0f} s.",
                hint="try again where the machine is less busy; measure arithmetic alone with --ranks 1.",
            )
        if not result.exists():
            raise MemadvisorError(
                f"{num_ranks} processes could not run collectives with each other.",
                hint="see their messages above; measure arithmetic alone with --ranks 1.",
            )
        measured = json.loads(result.read_text())
    usual: list[CollectiveCurve] = []
    others: list[CollectiveCurve] = []
    for what, durations in measured["durations"].items():
        operation, _, algorithm = what.partition(" by ")
        durations_s = _never_longer_than_larger(durations)
        curve = CollectiveCurve(
            operation=operation,
            num_ranks=num_ranks,
            sizes_bytes=sizes_bytes,
            durations_s=durations_s,
            pieces=fit_pieces(sizes_bytes, durations_s),
            algorithm=algorithm or None,
        )
        (others if algorithm else usual).append(curve)
    return tuple(usual), tuple(others), OverlapSlowdown(**measured["overlap"])


def _never_longer_than_larger(durations_s: Sequence[float]) -> tuple[float, ...]:
    """A disturbed point is corrected by the larger messages, which cannot have been faster."""
    return tuple(min(durations_s[position:]) for position in range(len(durations_s)))


def _join(processes: list[multiprocessing.context.SpawnProcess], limit_s: float) -> bool:
    """Wait for all of them, until one has failed or time is up; whether it is not."""
    deadline_s = time.monotonic() + limit_s
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            return True
        if time.monotonic() > deadline_s:
            return False
        processes[0].join(0.05)
        time.sleep(0.05)
    return True


def _rank_main(
    rank: int, directory: str, device_type: str, num_ranks: int, sizes_bytes: tuple[int, ...], budget_s: float
) -> None:
    end_with_parent()
    # torch 2.13 gave the tensor collectives new names, which 2.11 does not know.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
    )
    # Among two it is what is done anyway, and of CUDA tensors the backend's own gathers are.
    has_choice = device.type == "cpu" and num_ranks > 2
    others = [_TOGETHER, *([_BY_DOUBLING] if can_double("all_gather", num_ranks) else [])]
    measured_ones = (*OPERATIONS, *(others if has_choice else ()))
    share_s = budget_s / (len(measured_ones) * len(sizes_bytes))
    durations = {
        what: [_seconds(what, size, device, num_ranks, share_s) for size in sizes_bytes]
        for what in measured_ones
    }
    overlap = measure_overlap(
        device,
        [_collective(operation, MESSAGE_BYTES, device, num_ranks) for operation in OPERATIONS],
        num_turns=int(_TURNS_PER_S * budget_s),
    )
    if rank == 0:
        measured = {"durations": durations, "overlap": asdict(overlap)}
        (Path(directory) / "durations.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(operation: str, size_bytes: int, device: torch.device, num_ranks: int, budget_s: float) -> float:
    """Median of repeated runs; all ranks agree on how many from rank 0's first two."""
    run = _collective(operation, size_bytes, device, num_ranks)
    run()  # the first one of a size connects and allocates
    trial_s = _timed(run, device)
    count = torch.tensor([min(200, max(3, int(budget_s / max(trial_s, 1e-6))))], device=device)
    dist.broadcast(count, 0)
    return median(_timed(run, device) for _ in range(int(count.item())))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def _collective(
    operation: str, size_bytes: int, device: torch.device, num_ranks: int
) -> Callable[[], object]:
    """The collective as our engine issues it, on float32 of `size_bytes` in full.

    On Gloo gathers and reductions to shards are the engine's own messages: Gloo's reduce_scatter clones its
    input and sums all of it (memadvisor/engines/collectives/wire.py).
    """
    num_elements = max(num_ranks, size_bytes // 4 // num_ranks * num_ranks)
    full = torch.zeros(num_elements, device=device)
    shard = torch.zeros(num_elements // num_ranks, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(full)
    if device.type == "cuda":
        if operation == "all_gather":
            return lambda: all_gather(full, shard)
        return lambda: reduce_scatter(shard, full)
    slices, rank = full.chunk(num_ranks), dist.get_rank()
    pieces = [[each] for each in slices]
    if operation == _TOGETHER:
        others = torch.zeros((num_ranks - 2) * shard.numel()).chunk(num_ranks - 2)
        return lambda: reduce_together(exchange, pieces, rank, shard, others)
    if operation == _BY_DOUBLING:
        return lambda: gather_by_doubling(exchange, full, rank, num_ranks)
    if operation == "all_gather":
        return lambda: gather_pairwise(exchange, slices, rank)
    return lambda: reduce_pairwise(exchange, pieces, rank, shard)
