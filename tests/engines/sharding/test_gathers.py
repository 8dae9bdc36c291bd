"""What the next forward begins with comes in behind its update, and is used where it is still true on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.gathers import Gathers
from memadvisor.engines.sharding.transfers import Transfers
from memadvisor.engines.updates import updates_by_unit
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan

Between = Callable[[nn.Module, torch.optim.Optimizer, int], object]


def _evaluate(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with torch.no_grad():
        ddp(torch.arange(4).view(1, 4))


def _evaluate_on_one(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            ddp.module(torch.arange(4).view(1, 4))


def _write(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with torch.no_grad():
        ddp.module.tokens.weight.mul_(0.5)


def _write_past_us(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    ddp.module.tokens.weight.data.mul_(0.5)


def _load(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    ddp.module.load_state_dict({name: value * 0.5 for name, value in ddp.module.state_dict().items()})


def _step_again(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    ddp(torch.arange(4).view(1, 4))  # of the first step a training pass, which no backward follows
    optimizer.step()
    optimizer.step()


def _read_on_one(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if rank == 1:
        ddp.module.tokens.weight.sum().item()


# What a script may do between two steps; of each, whether what came in behind updates is of no use then.
BETWEEN: dict[str, tuple[Between, bool]] = {
    "nothing": (lambda *_: None, False),
    "evaluates": (_evaluate, True),
    "evaluates on one rank": (_evaluate_on_one, True),
    "writes": (_write, True),
    "writes past us": (_write_past_us, True),
    "loads": (_load, True),
    "steps again": (_step_again, False),
    "reads on one rank": (_read_on_one, True),
}


class Seen:
    """Which flats have begun to be gathered behind their updates."""

    def __init__(self) -> None:
        self.units: list[str] = []

    def watching(self) -> mock._patch[Callable[[Transfers, object], object]]:
        begin = Gathers.begin_behind_update

        def begin_behind_update(gathers: Gathers, flat):
            begin(gathers, flat)
            if flat.arriving is not None:
                self.units.append(flat.unit)

        return mock.patch.object(Gathers, "begin_behind_update", begin_behind_update)


def train(rank: int, between: Between, steps: int) -> tuple[list[torch.Tensor], list[int]]:
    """Losses and weights; and how many flats each step has begun to gather behind their updates."""
    ddp = build(Training(), rank)
    optimizer = make_optimizer("adamw", ddp)
    data, seen, found, begun = torch.Generator().manual_seed(rank), Seen(), [], []
    with seen.watching():
        for _ in range(steps):
            loss = ddp(torch.randint(0, 13, (4, 6), generator=data)).square().mean()
            loss.backward()
            found.append(loss.detach())
            seen.units.clear()
            optimizer.step()
            begun.append(len(seen.units))
            between(ddp, optimizer, rank)
            optimizer.zero_grad()
    return [*found, nn.utils.parameters_to_vector(ddp.parameters()).detach()], begun


def trainings(rank: int) -> dict[str, tuple[bool, list[int]]]:
    """Whether all is as without a plan, in every bit; and how many flats each step has begun to gather."""
    plan = make_plan(dist.get_world_size(), 3, overlap=True, update_by_unit=True, gather_depth=1)
    answers = {}
    for name, (between, _) in BETWEEN.items():
        plain, _ = train(rank, between, steps=5)
        with applied(plan):
            ours, begun = train(rank, between, steps=5)
        is_same = all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
        answers[name] = (is_same, begun)
    return answers


def test_whatever_a_script_does_between_steps_its_training_is_the_same_and_one_that_spoils_it_is_left_alone():
    for answers in run_ranks(trainings, 2):
        for name, (is_same, begun) in answers.items():
            assert is_same, name
            is_spoilt = BETWEEN[name][1]
            # What is the model's own, the embedding and a block; and nothing, from the third meeting that found them spoilt on.
            assert begun == ([3, 3, 3, 0, 0] if is_spoilt else [3] * 5), name


def orders(rank: int) -> list[str]:
    """What is updated and gathered from the second optimizer step to the end of the forward behind it, in order."""
    plan = make_plan(dist.get_world_size(), 3, overlap=True, update_by_unit=True, gather_depth=1)
    events: list[str] = []
    with applied(plan):
        ddp = build(Training(), rank)
        optimizer = make_optimizer("adamw", ddp)
        step, begin, gather = updates_by_unit.step_only, Transfers.begin_gather, Transfers.gather
        enter = Executor.enter_module

        def step_only(optimizer, own, slot_of, label):
            step(optimizer, own, slot_of, label)
            units = {slot_of(p).flat.unit for p in ddp.parameters() if id(p) in own}
            events.extend(f"update {unit}" for unit in units)

        def begin_gather(self, flat):
            events.append(f"begin {flat.unit}")
            return begin(self, flat)

        def gather_now(self, flat):
            events.append(f"gather {flat.unit}")
            return gather(self, flat)

        def enter_module(self, module):
            if module is ddp.module:
                events.append("forward")
            enter(self, module)

        with (
            mock.patch.object(updates_by_unit, "step_only", step_only),
            mock.patch.object(Transfers, "begin_gather", begin_gather),
            mock.patch.object(Transfers, "gather", gather_now),
            mock.patch.object(Executor, "enter_module", enter_module),
        ):
            words = torch.arange(4).view(1, 4)
            ddp(words).square().mean().backward()
            events.clear()
            optimizer.step()
            optimizer.zero_grad()
            ddp(words)
    return events


def test_the_first_units_are_on_their_way_while_the_next_are_updated_and_the_forward_gathers_them_no_more():
    first, *others = run_ranks(orders, 2)
    assert others == [first]
    forward = first.index("forward")
    step, passing = first[:forward], first[forward + 1 :]
    units = [unit.removeprefix("begin ") for unit in step if unit.startswith("begin ")]
    assert units == ["", "tokens", "blocks.0"]
    assert step == [f"{what} {unit}" for unit in units for what in ("update", "begin")]
    assert not {f"begin {unit}" for unit in units} & set(passing)
    assert passing and all(event.startswith("begin ") for event in passing)  # nothing is waited for at once


def any_order(rank: int) -> list[int]:
    """With unused parameters allowed, ranks may need different units: nothing is gathered that nobody asked for."""
    plan = make_plan(dist.get_world_size(), 3, overlap=True, update_by_unit=True, gather_depth=1)
    with applied(plan):
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), find_unused_parameters=True
        )
        optimizer, seen, begun = torch.optim.AdamW(ddp.parameters()), Seen(), []
        with seen.watching():
            for _ in range(2):
                ddp(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                begun.append(len(seen.units))
    return begun


def test_nothing_is_gathered_behind_updates_where_ranks_may_take_different_ways():
    assert run_ranks(any_order, 2) == [[0, 0], [0, 0]]
