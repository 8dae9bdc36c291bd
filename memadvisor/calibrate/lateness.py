"""How much later messages end that go between ranks which compute, and how far ranks that compute the same come apart.

Each rank trains a small block over and over, as a script does: operators of some ten microseconds, between which the
interpreter's lock changes hands. Beside each forward and backward a lane's thread (thread_lane.py) exchanges a message as
a stage's gathers do, which is waited for a turn later. It is compared with the same messages when nothing is computed. Of
the delays the mean is taken, since waiting adds them up; where other processes use the machine it is larger.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import mean

import torch
import torch.distributed as dist

from memadvisor.calibrate.messages import exchange
from memadvisor.engines.collectives.exchanges import gather_pairwise
from memadvisor.engines.lanes.thread_lane import ThreadLane, ThreadTicket

_MESSAGE_ELEMENTS = 16 * 1024  # 64 KiB in all: what it takes by itself is little
_WIDTH, _BATCH, _NUM_LAYERS = 128, 128, 6
_WARM_TURNS = 20
_TURNS_OF_A_STEP = 12  # after so many do ranks of a plain training wait for each other


class _Training:
    """A block of layers, and a batch."""

    def __init__(self) -> None:
        layers = (
            module
            for _ in range(_NUM_LAYERS)
            for module in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU())
        )
        self._block = torch.nn.Sequential(*layers)
        self._batch = torch.ones(_BATCH, _WIDTH)

    def turn(self) -> None:
        self._block.zero_grad()
        self._block(self._batch).sum().backward()


class _Messages:
    """Gathers of one size, and what each has taken from when it was handed over."""

    def __init__(self) -> None:
        num_ranks, self._rank = dist.get_world_size(), dist.get_rank()
        self._slices = torch.zeros(_MESSAGE_ELEMENTS // num_ranks * num_ranks).chunk(num_ranks)
        self.seconds: list[float] = []

    def gather(self, handed_over_s: float) -> None:
        gather_pairwise(exchange, self._slices, self._rank)
        self.seconds.append(time.perf_counter() - handed_over_s)

    def mean_s(self) -> float:
        return mean(self.seconds[_WARM_TURNS:])


def measure_late_s(num_turns: int) -> float:
    """Called by all ranks at once: seconds, as the mean over ranks; never less than 0.

    num_turns: forwards and backwards of the block, of some milliseconds each.
    """
    training, lane, alone, beside = _Training(), ThreadLane(), _Messages(), _Messages()
    dist.barrier()
    for _ in range(_WARM_TURNS + num_turns):
        lane.submit(partial(alone.gather, time.perf_counter())).wait()
    dist.barrier()
    under_way: ThreadTicket | None = None
    for _ in range(_WARM_TURNS + num_turns):
        if under_way is not None:
            under_way.wait()
        under_way = lane.submit(partial(beside.gather, time.perf_counter()))
        training.turn()
    lane.run(_nothing)
    lane.close()
    return max(0.0, _mean_of_ranks(beside.mean_s() - alone.mean_s()))


def _nothing() -> None:
    """After all that was handed over before."""


def measure_spread(num_turns: int) -> float:
    """Called by all ranks at once: by how much longer the slowest rank takes for some compute, as a share of the mean."""
    training, longest_s, all_s = _Training(), 0.0, 0.0
    for _ in range(max(1, num_turns // _TURNS_OF_A_STEP)):
        dist.barrier()
        started_s = time.perf_counter()
        for _ in range(_TURNS_OF_A_STEP):
            training.turn()
        taken_s = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
        all_s += _mean_of_ranks(taken_s.item())
        dist.all_reduce(taken_s, dist.ReduceOp.MAX)
        longest_s += taken_s.item()
    return max(0.0, longest_s / all_s - 1)


def _mean_of_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
