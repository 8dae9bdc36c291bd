"""Running a function on several Gloo ranks of this machine, and getting back what each returned.

Starting ranks takes seconds, so those of the last world size are kept for the next case. A case that
fails or hangs takes its ranks with it.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import pickle
import queue
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from memadvisor import api
from memadvisor.run.compiled import has_compiled


class _Pool:
    def __init__(self, num_ranks: int) -> None:
        # Ranks are forks of one process that has imported torch, and nothing else: importing it takes seconds.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "tests.engines.trainings"])
        self.num_ranks = num_ranks
        self.results: Any = context.Queue()
        self.jobs: list[Any] = [context.Queue() for _ in range(num_ranks)]
        # The parent's own store: a port that is looked for first may be somebody else's by then.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self.store.port
        self.processes = [
            context.Process(target=_rank, args=(rank, num_ranks, port, jobs, self.results), daemon=True)
            for rank, jobs in enumerate(self.jobs)
        ]
        for process in self.processes:
            process.start()

    def run(self, case: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for jobs in self.jobs:
            jobs.put((case, args, timeout_s))
        found: dict[int, Any] = {}
        while len(found) < self.num_ranks:
            try:
                rank, error, value = self.results.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(f"ranks {set(range(self.num_ranks)) - set(found)} hang") from None
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = pickle.loads(value)
        return [found[rank] for rank in range(self.num_ranks)]

    def end(self) -> list[int | None]:
        """Let the ranks end by themselves; returns their exit codes."""
        for jobs in self.jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(timeout=20)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


_pools: list[_Pool] = []


def run_ranks(case: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """`case(rank, *args)` on each rank; fails with the first rank's traceback, or when time is up."""
    if not _pools or _pools[0].num_ranks != num_ranks:
        end_ranks()
        _pools.append(_Pool(num_ranks))
    try:
        return _pools[0].run(case, args, timeout_s)
    except BaseException:
        _pools.pop().kill()
        raise


def end_ranks() -> list[int | None]:
    """Exit codes of the ranks that were kept."""
    return _pools.pop().end() if _pools else []


atexit.register(end_ranks)


def _forget_compiled() -> None:
    """The next case is of a process in which torch.compile has not been at work."""
    if has_compiled():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def _rank(rank: int, num_ranks: int, port: int, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    # Of each profile's beginning, 0.1 s: what it measures of a process is that of the process, not of a case.
    api.measure_engines = functools.cache(api.measure_engines)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store)
        while (job := jobs.get()) is not None:
            case, args, timeout_s = job
            # A recording, and a plan that is taken off, look through all objects: not those that the case has imported.
            gc.freeze()
            faulthandler.dump_traceback_later(0.9 * timeout_s)  # where a rank hangs
            results.put((rank, None, pickle.dumps(case(rank, *args))))
            faulthandler.cancel_dump_traceback_later()
            gc.collect()  # or the next case has the memory of this one's cycles, for a while
            _forget_compiled()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise
