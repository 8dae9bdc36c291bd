"""One rank of a training under the real executor, whose other ranks are made up: they answer with fixed numbers.

Nothing is sent, so a step takes milliseconds, and the lane may do its work at any moment that the tickets allow.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memadvisor.compression import Compression
from memadvisor.engines.collectives.messages import Messages
from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import read_model
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding import one_process as wires
from memadvisor.engines.sharding.executor import Executor
from memadvisor.executors import Algorithm
from memadvisor.plan import Plan, UnitPlan
from memadvisor.precision import Precision
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import loose_from, make_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Small(nn.Module):
    """Tied weights, a parameter of the model itself, and a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words):
        x = self.tokens(words) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ROWS = read_model(Small()).rows
UNITS = tuple(row.name for row in ROWS)


@dataclass(frozen=True)
class Case:
    """A plan and a loop: `synced` says of each micro-batch whether it is outside no_sync.

    looks: the script reads a parameter between the optimizer step and the next forward. loose_bytes: of gradients that stay
    where they are made; None: none is as large. steps_again: there are two optimizer steps behind a backward.
    """

    plan: Plan
    rank: int
    synced: tuple[bool, ...]
    evaluates: bool
    looks: bool
    loose_bytes: int | None = None
    steps_again: bool = False


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    num_ranks = draw.randint(2, 4)
    stages = draw.choice([(3,), (2, 3), (0, 1, 2, 3), (1, 2)])
    units = tuple(
        UnitPlan(name=name, zero_stage=draw.choice(stages), recompute=False, reshard=draw.random() < 0.7)
        for name in UNITS
    )
    overlap = draw.random() < 0.9
    shard_ranks = 2 if num_ranks == 4 and draw.random() < 0.5 else None
    plan = make_plan(
        num_ranks,
        3,
        units=units,
        overlap=overlap,
        gather_depth=draw.randint(0, 3),
        shard_ranks=shard_ranks,
    )
    synced = (*(draw.random() < 0.5 for _ in range(draw.randint(0, 1))), True)
    case = Case(plan, draw.randrange(num_ranks), synced, draw.random() < 0.2, draw.random() < 0.3)
    early = not case.evaluates and draw.random() < 0.5
    plan = replace(plan, update_in_backward=early and max(unit.zero_stage for unit in units) >= 2)
    case = replace(case, plan=plan)
    least = min(unit.zero_stage for unit in units)
    precision = Precision(
        param_dtype=draw.choice([None, "bfloat16"]) if least == 3 else None,
        reduce_dtype=draw.choice([None, "bfloat16"]) if least >= 2 else None,
    )
    compression = Compression(
        gather_bits=draw.choice([None, 8]) if least == 3 else None,
        reduce_bits=draw.choice([None, 4, 8]) if least >= 2 and precision.reduce_dtype is None else None,
    )
    together = Algorithm(operation="reduce_scatter", min_bytes=draw.choice([0, 256]), name="together")
    algorithms = draw.choice([(), (together,)])
    plan = replace(plan, precision=precision, compression=compression, algorithms=algorithms)
    if overlap and max(unit.zero_stage for unit in units) >= 2:
        plan = replace(plan, reduce_depth=draw.randint(1, 3))
    plan = replace(plan, update_by_unit=not plan.update_in_backward and draw.random() < 0.5)
    case = replace(case, plan=plan, loose_bytes=draw.choice([None, 1, 20]))
    return replace(case, steps_again=plan.update_by_unit and draw.random() < 0.3)


class _Answer:
    def __init__(self, answer: Callable[[], None]) -> None:
        self.wait = answer


class DrawnMessages(Messages):
    """Nobody is sent anything, and what comes from a rank is drawn from what it is for."""

    def __init__(self, num_ranks: int) -> None:
        self.global_ranks = list(range(num_ranks))
        self._num_messages: dict[Any, int] = {}

    def begin_send(self, operation, unit, sent, to, tag):
        return _Answer(sent.sum)

    def begin_receive(self, operation, unit, received, source, tag):
        key = (operation, tag, source)
        number = self._num_messages.get(key, 0)
        self._num_messages[key] = number + (operation == "reduce-scatter")
        return _Answer(partial(_draw, received, (*key, number)))


class AloneWire(Wire):
    """What the other ranks hold, and send, is drawn from what it is for."""

    def __init__(self, staged: Any, case: Case, lane: Any) -> None:
        self.group = self.everyone = self._host = None
        self.across = "across" if case.plan.group_ranks < case.plan.num_ranks else None
        self.num_contributions = case.plan.num_ranks
        self.num_ranks, self.rank = case.plan.group_ranks, case.rank % case.plan.group_ranks
        self._staged, self.algorithms = staged, case.plan.algorithms
        self._lane_for, self._lanes = (lambda device: lane), {}
        self._messages = DrawnMessages(self.num_ranks)
        self._num_messages: dict[Any, int] = {}

    def _sum_across(self, shard, unit):
        key = ("across", unit, shard.numel())
        self._num_messages[key] = self._num_messages.get(key, 0) + 1
        _draw(shard, (*key, self._num_messages[key]), add=True)

    def _begin_sum(self, tensor, unit, group):
        key = ("all-reduce", unit, tensor.numel())
        self._num_messages[key] = self._num_messages.get(key, 0) + 1
        answer = partial(_draw, tensor, (*key, self._num_messages[key]), add=True)
        return self.lane(tensor.device).adopt([_Answer(answer)], writes=(tensor,))

    def largest(self, values):
        return values

    def broadcast(self, values):
        return values


def _draw(tensor: torch.Tensor, key: Any, add: bool = False) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    values = torch.rand(tensor.shape, generator=generator)
    # A packed message: bytes that make scales of about one, and any codes.
    values = values * 63 if tensor.dtype == torch.uint8 else values - 0.5
    tensor.add_(values) if add else tensor.copy_(values)


class _Ddp:
    _active_ddp_module = None
    process_group = None
    require_backward_grad_sync = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        _Ddp._active_ddp_module = self
        try:
            return self.module(*args)
        finally:
            _Ddp._active_ddp_module = None


class _Alone:
    """No script steps an optimizer, and no other rank asks."""

    def unknown_module(self, module):
        pass

    def before_step(self, optimizer, args, kwargs):
        pass

    def after_step(self, optimizer):
        pass

    def open(self, kept):
        pass

    def stop(self):
        pass

    def fetch_parameters(self, flat, full):
        for rank, part in enumerate(full.chunk(flat.num_ranks)):
            part.copy_(flat.shard) if rank == flat.rank else _draw(
                part, ("all-gather", 2 * flat.index, rank, 0)
            )


@contextmanager
def executing(case: Case, lane: Any) -> Iterator[tuple[_Ddp, Executor]]:
    torch.default_generator.manual_seed(3)  # torch's own function writes a traceback for each kind of device
    root, undo = Small(), Undo()
    ddp, model = _Ddp(root), read_model(root)
    original = wires.Wire
    wires.Wire = lambda group, staged, number, **_: AloneWire(staged, case, lane)
    try:
        hooks = Hooks(_Alone(), undo)
        schedule = write_schedule(case.plan, model.rows)
        with loose_from(case.loose_bytes):
            executor = Executor(model, schedule, ddp, hooks, lambda *_: None, False, lambda _: _Alone())
        yield ddp, executor
    finally:
        wires.Wire = original
        undo.run()


def train_alone(case: Case, lane: Any) -> list[torch.Tensor]:
    """Losses, the next step's too, and what this rank holds in the end."""
    with executing(case, lane) as (ddp, executor):
        words = torch.arange(4)
        losses = []
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
        if case.plan.update_in_backward:
            _as_after_a_step(executor, optimizer, len(case.synced))
        for synced in case.synced:
            ddp.require_backward_grad_sync = synced
            loss = ddp(words).square().mean()
            loss.backward()
            losses.append(loss.detach())
        if case.evaluates:
            with torch.no_grad():
                losses.append(ddp.module(words).sum())
        executor.early.step_begins(optimizer, executor.slots)
        for _ in range(1 + case.steps_again):
            _step(executor)
        if case.looks:
            losses.append(ddp.module.blocks[2].linear.weight.detach().sum())
        losses.append(ddp(words).detach().sum())
        executor.arrivals.settle()  # of units that the model did not come to
        held = [flat.shard.clone() for flat in executor.flats if flat.shard is not None]
        executor.detach()
        return losses + held


def _as_after_a_step(executor: Executor, optimizer: torch.optim.Optimizer, num_backwards: int) -> None:
    """All ranks have watched one, and update in the backward from here on."""
    early = executor.early
    early._rhythm, early._is_agreed = (num_backwards, True), True
    for slot in executor.slots:
        early._optimizers[slot.name] = optimizer


def _step(executor: Executor) -> None:
    """Of what has gradients left, as SGD does it."""
    executor.step_begins()
    with torch.no_grad():
        for flat in executor.flats:
            gradient = flat.grad_shard if flat.stage >= 2 else flat.grad
            if flat.trainable and flat.shard is not None and gradient is not None:
                whole = gradient if flat.stage >= 2 else flat.new(flat.padded_numel).zero_()
                if flat.stage < 2:
                    whole[: flat.num_elements] = gradient[: flat.num_elements]
                    whole = flat.own_slice(whole)
                flat.shard.add_(whole, alpha=-0.1)
                if flat.unit in executor.sharded.schedule.gathered_behind_updates:
                    executor.updated(flat)
    executor.step_ends(executor.flats)
    for flat in executor.flats:
        for slot in flat.slots:
            slot.parameter.grad = None
