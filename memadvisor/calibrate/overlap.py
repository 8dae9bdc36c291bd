"""What compute and collectives cost each other at the same time, among processes of this machine.

Each rank multiplies matrices in one thread, as a training does, while another thread exchanges messages as the engine's
lane does; then the same of each alone. What is counted is how far each gets in the same time. Where ranks have less than
two cores each, the thread that exchanges, and those of the backend, take their processor time of the core that computes:
then it is counted by how much less of a core is left, of which other processes on the machine are no part.

How late messages are (lateness.py) belongs to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from memadvisor.calibrate.lateness import measure_late_s, measure_spread
from memadvisor.hardware.cores import share_cores
from memadvisor.hardware.hardware import OverlapSlowdown

MESSAGE_BYTES = 4 * 2**20  # about a transformer block's gradients, and what a bucket has
_SIDE = {"cpu": 384, "cuda": 4096}
_ROUNDS = 5
_NUM_MESSAGES = 12  # of a round
_LARGEST_SHARE = 0.9  # of a core that exchanging may take: compute still goes on


def measure_overlap(
    device: torch.device, collectives: list[Callable[[], object]], num_turns: int
) -> OverlapSlowdown:
    """Called by all ranks at once: medians of rounds, of the rank that is slowed down most.

    num_turns: of a small training, beside which it is seen how late messages are.
    """
    side = _SIDE[device.type]
    left, right = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    out = torch.empty_like(left)

    def compute() -> None:
        torch.mm(left, right, out=out)
        _finish(device)

    on_one_core = device.type == "cpu" and share_cores(dist.get_world_size())
    compute_ratios, collective_ratios = [], []
    for _ in range(_ROUNDS):
        alone_s = _exchange(collectives, device)
        dist.barrier()
        deadline_s = time.perf_counter() + alone_s
        product_s = _product_s(compute, partial(_is_before, deadline_s))
        both_s, together_s, others_s = _both(compute, collectives, device)
        share = min(_LARGEST_SHARE, others_s / together_s)
        compute_ratios.append(1 / (1 - share) if on_one_core else both_s / product_s)
        collective_ratios.append(together_s / alone_s)
    factors = torch.tensor([median(compute_ratios), median(collective_ratios)], device=device)
    dist.all_reduce(factors, dist.ReduceOp.MAX)
    # Nothing is faster in company than alone: less than 1 is noise.
    compute_factor, collective_factor = factors.clamp(min=1.0).tolist()
    is_cpu = device.type == "cpu"  # a GPU's host does not wait for messages
    return OverlapSlowdown(
        compute=compute_factor,
        collective=collective_factor,
        late_s=measure_late_s(num_turns) if is_cpu else None,
        spread=measure_spread(num_turns) if is_cpu else None,
    )


def _exchange(collectives: list[Callable[[], object]], device: torch.device) -> float:
    """Seconds of a round of messages, from when all ranks are ready."""
    dist.barrier()
    started_s = time.perf_counter()
    for number in range(_NUM_MESSAGES):
        collectives[number % len(collectives)]()
    _finish(device)
    return time.perf_counter() - started_s


def _is_before(deadline_s: float) -> bool:
    return time.perf_counter() < deadline_s


def _product_s(compute: Callable[[], None], goes_on: Callable[[], bool]) -> float:
    """Seconds of one product, one after another for as long as it goes on."""
    started_s, count = time.perf_counter(), 0
    while goes_on() or not count:
        compute()
        count += 1
    return (time.perf_counter() - started_s) / count


def _both(
    compute: Callable[[], None], collectives: list[Callable[[], object]], device: torch.device
) -> tuple[float, float, float]:
    """Seconds of one product while messages go on, of a round of messages while products do, and the processor's that
    other threads take meanwhile."""
    taken_s: list[float] = []

    def exchange() -> None:
        # On the stream of the products the messages would wait for them.
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch has no types for it
        taken_s.append(_exchange(collectives, device))

    thread = threading.Thread(target=exchange)
    own_s, all_s = time.thread_time(), time.process_time()
    thread.start()
    product_s = _product_s(compute, thread.is_alive)
    thread.join()
    own_s, all_s = time.thread_time() - own_s, time.process_time() - all_s
    return product_s, taken_s[0], max(0.0, all_s - own_s)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
