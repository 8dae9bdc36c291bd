"""Running a function on several Gloo ranks of this machine, and getting back what each returned."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(case: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """`case(rank, *args)` on each rank; fails with the first rank's traceback, or when time is up."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_rank, args=(case, rank, num_ranks, port, results, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < num_ranks:
            rank, error, value = results.get(timeout=timeout_s)
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = pickle.loads(value)
        for process in processes:
            process.join(timeout=20)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    except queue.Empty:
        raise AssertionError(f"ranks {set(range(num_ranks)) - set(found)} hang") from None
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(num_ranks)]


def _rank(case: Callable[..., Any], rank: int, num_ranks: int, port: int, results: Any, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        value = case(rank, *args)
        results.put((rank, None, pickle.dumps(value)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
