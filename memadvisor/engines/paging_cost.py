"""What the engine itself takes of the thread that computes where one process has parameters and gradients on disk, or
what autograd keeps.

As engine_cost.py finds it for several ranks: small models are trained plainly, with the one and with the other on disk, in
one micro-batch and in three, and the processor time of the thread that computes is compared, in the optimizer's call
and outside of it. How long the bytes take is not in it.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch

from memadvisor.engines.apply import apply
from memadvisor.engines.cost_fit import BATCH, LIMIT_S, WIDTH, failure, least_squares, make_blocks
from memadvisor.hardware.hardware import PagingCost
from memadvisor.plan import Plan
from memadvisor.run.helpers import end_with_parent, started

_MODELS = ((2, 2), (12, 1), (4, 8))  # blocks, and linear layers in each, of a weight and a bias
_MICRO_BATCHES = (1, 3)
_WARM_STEPS, _NUM_STEPS = 4, 16
_PARAMETERS = Plan(
    num_ranks=1, zero_stage=3, optimizer_tier="disk", parameter_tier="disk", overlap=True, gather_depth=1
)
_ACTIVATIONS = Plan(num_ranks=1, zero_stage=0, activation_tier="disk", overlap=True)


@dataclass(frozen=True, slots=True)
class _Spent:
    """Processor seconds of a step's passes, and of its optimizer's call."""

    passes_s: float
    optimizer_s: float


def measure_paging_cost() -> PagingCost | None:
    """Start a process that trains on the CPU. None where there is a GPU, beside whose work all of this is done.

    Raises MemadvisorError when it fails.
    """
    if torch.cuda.is_available():
        return None
    with tempfile.TemporaryDirectory(prefix="memadvisor-") as scratch:
        result = Path(scratch) / "cost.json"
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_main, args=(result,), daemon=True)
        with started([process]):
            process.join(LIMIT_S)
            is_late = process.is_alive()
        if not result.exists():
            raise failure("A process could not train with its parameters on disk", is_late)
        return PagingCost(**json.loads(result.read_text()))


def _main(result: Path) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    result.write_text(json.dumps(asdict(_fit())))


def _fit() -> PagingCost:
    counts: list[list[int]] = []
    spent_s: list[float] = []
    for num_blocks, num_layers in _MODELS:
        for micro_batches in _MICRO_BATCHES:
            plain, paged, moved = (
                _trained(num_blocks, num_layers, micro_batches, plan)
                for plan in (None, _PARAMETERS, _ACTIVATIONS)
            )
            counts += _counts(num_blocks, 2 * num_layers * num_blocks, micro_batches)
            spent_s += [paged.passes_s - plain.passes_s, paged.optimizer_s - plain.optimizer_s]
            counts.append([0, 0, 0, _num_moved(num_blocks, num_layers) * micro_batches])
            spent_s.append(moved.passes_s - plain.passes_s)
    return PagingCost(**least_squares([field.name for field in fields(PagingCost)], counts, spent_s))


def _counts(num_units: int, num_parameters: int, micro_batches: int) -> list[list[int]]:
    """How often each kind of work is done in a step's passes, and in its optimizer's call, in the order of PagingCost's
    fields."""
    gathers = 2 * micro_batches
    # Gradients are written, and read to be added to.
    transfers = gathers + micro_batches + (micro_batches - 1)
    return [[transfers * num_units, gathers * num_parameters, 0, 0], [3 * num_units, 0, num_parameters, 0]]


def _num_moved(num_blocks: int, num_layers: int) -> int:
    """Inputs of all layers and of all activation functions, but for the batch itself, which needs no gradient."""
    return 2 * num_layers * num_blocks - 1


def _trained(num_blocks: int, num_layers: int, micro_batches: int, plan: Plan | None) -> _Spent:
    """What the median step spends."""
    model = make_blocks(num_blocks, num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    applied = None if plan is None else apply(plan, model, optimizer)
    try:
        steps = [_step(model, optimizer, micro_batches) for _ in range(_WARM_STEPS + _NUM_STEPS)]
    finally:
        if applied is not None:
            applied.remove()
    last = steps[_WARM_STEPS:]
    return _Spent(*(median(getattr(step, field.name) for step in last) for field in fields(_Spent)))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int) -> _Spent:
    batch = torch.ones(BATCH, WIDTH)
    start_s = time.thread_time()
    for _ in range(micro_batches):
        model(batch).sum().backward()
    before_s = time.thread_time()
    optimizer.step()
    after_s = time.thread_time()
    optimizer.zero_grad()
    return _Spent(before_s - start_s, after_s - before_s)
