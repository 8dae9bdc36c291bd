"""What the engine itself takes of the thread that computes: its hooks, views, submissions and swaps.

Small models are trained under DDP and under plans, among Gloo ranks of this machine, and the processor time of the
thread that computes is compared: a difference of the thread's own account, which neither waiting nor what else runs on
the machine is in. Each training is a sum of a few kinds of work whose counts are known; least squares over all of them
give what one of each kind takes (hardware.EngineCost). Where ranks have less than two cores each, what other threads
take for a collective comes from the core that computes, and is counted too.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memadvisor.engines.apply import apply
from memadvisor.engines.cost_fit import BATCH, LIMIT_S, WIDTH, failure, least_squares, make_blocks
from memadvisor.hardware.cores import share_cores
from memadvisor.hardware.hardware import EngineCost
from memadvisor.plan import Plan
from memadvisor.run.helpers import end_with_parent, started

_MODELS = ((2, 2), (8, 2), (4, 8), (8, 8))  # blocks, and linear layers in each, of a weight and a bias
_STAGES = (0, 1, 3)  # stage 2 does nothing that they do not
_WARM_STEPS, _NUM_STEPS = 4, 16


@dataclass(frozen=True, slots=True)
class _Spent:
    """Processor seconds of a step, and of the optimizer's call in it, of one thread; and of all others in the step."""

    step_s: float
    optimizer_s: float
    others_s: float


def measure_engine_cost(num_ranks: int) -> EngineCost | None:
    """Start `num_ranks` processes that train on the CPU. None where there is a GPU, beside whose work all of this is done.

    Raises MemadvisorError when they fail.
    """
    if torch.cuda.is_available():
        return None
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="memadvisor-") as directory:
        processes = [
            context.Process(target=_rank_main, args=(rank, num_ranks, directory), daemon=True)
            for rank in range(num_ranks)
        ]
        with started(processes):
            deadline_s = time.monotonic() + LIMIT_S
            for process in processes:
                process.join(max(0.0, deadline_s - time.monotonic()))
            is_late = any(process.is_alive() for process in processes)
        result = Path(directory) / "cost.json"
        if not result.exists():
            raise failure(f"{num_ranks} processes could not train with each other under a plan", is_late)
        return EngineCost(**json.loads(result.read_text()))


def _rank_main(rank: int, num_ranks: int, directory: str) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    cost = _fit(num_ranks)
    if rank == 0:
        (Path(directory) / "cost.json").write_text(json.dumps(asdict(cost)))
    dist.barrier()
    dist.destroy_process_group()


def _fit(num_ranks: int) -> EngineCost:
    counts: list[list[float]] = []
    spent_s: list[float] = []
    for num_blocks, num_layers in _MODELS:
        plain = _trained(num_blocks, num_layers, num_ranks, None)
        for stage in _STAGES:
            found = _trained(num_blocks, num_layers, num_ranks, stage)
            share = 1.0 if stage == 0 else 1.0 / num_ranks
            own_s = found.step_s - plain.step_s + (1.0 - share) * plain.optimizer_s
            computing, others = _rows(_counts(stage, num_blocks, 2 * num_layers * num_blocks))
            counts.append(computing)
            spent_s.append(own_s)
            if share_cores(num_ranks):
                counts.append(others)
                spent_s.append(found.others_s - plain.others_s)
    return EngineCost(**least_squares([field.name for field in fields(EngineCost)], counts, spent_s))


def _counts(stage: int, num_units: int, num_parameters: int) -> list[int]:
    """How often each kind of work is done in a step, in the order of EngineCost's fields."""
    num_collectives = {0: 1, 1: 2, 3: 3}[stage] * num_units
    num_pieces, num_shown = (num_parameters if stage else 0), (2 * num_parameters if stage == 3 else 0)
    return [num_parameters, num_collectives, num_collectives, num_pieces, num_shown]


def _rows(counts: list[int]) -> tuple[list[float], list[float]]:
    """What the thread that computes does of it, and what others do."""
    is_others = [field.name == "lane_s" for field in fields(EngineCost)]
    pairs = list(zip(counts, is_others, strict=True))
    return [0.0 if other else float(n) for n, other in pairs], [
        float(n) if other else 0.0 for n, other in pairs
    ]


def _trained(num_blocks: int, num_layers: int, num_ranks: int, stage: int | None) -> _Spent:
    """What a rank spends in the median step, as the mean over the ranks, which is the same on all."""
    model = DistributedDataParallel(make_blocks(num_blocks, num_layers))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with _under(stage, num_ranks, model, optimizer):
        steps = [_step(model, optimizer) for _ in range(_WARM_STEPS + _NUM_STEPS)][_WARM_STEPS:]
        optimizer.zero_grad()
    medians = [median(getattr(step, field.name) for step in steps) for field in fields(_Spent)]
    spent = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(spent)
    return _Spent(*(spent / num_ranks).tolist())


@contextlib.contextmanager
def _under(
    stage: int | None, num_ranks: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    if stage is None:
        yield
        return
    plan = Plan(num_ranks=num_ranks, zero_stage=stage, overlap=True, gather_depth=int(stage == 3))
    applied = apply(plan, model, optimizer)
    try:
        yield
    finally:
        applied.remove()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> _Spent:
    batch = torch.ones(BATCH, WIDTH)
    start_s, all_s = time.thread_time(), time.process_time()
    model(batch).sum().backward()
    before_s = time.thread_time()
    optimizer.step()
    after_s = time.thread_time()
    optimizer.zero_grad()
    step_s, all_s = time.thread_time() - start_s, time.process_time() - all_s
    return _Spent(step_s, after_s - before_s, all_s - step_s)
