"""What the script has again when a plan is taken off its model, or when it wraps the model anew."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from memadvisor.engines.apply import apply
from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, Training, applied, build, make_optimizer, make_plan


def same(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def wrapped_anew(rank: int, zero: int) -> tuple[dict[str, torch.Tensor], str]:
    """A part is frozen at first; the optimizer is made anew, the first wrapper stays, and is called at the end."""
    torch.manual_seed(0)
    model, wrappers, told = Model(tied=True), [], ""
    words = torch.arange(12).view(2, 6) % (5 + rank)
    with applied(make_plan(2, zero, "every-layer")) if zero else contextlib.nullcontext():
        for is_frozen in (True, False):
            model.blocks[0].requires_grad_(not is_frozen)
            wrappers.append(torch.nn.parallel.DistributedDataParallel(model))
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            for _ in range(3):
                wrappers[-1](words).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = copy.deepcopy(model.state_dict())
        if zero:
            try:
                wrappers[0](words)
            except PlanError as error:
                told = error.one_line()
    return weights, told


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_model_may_be_wrapped_anew(zero):
    """As those do who thaw layers, or call a library's fit twice."""
    plain, _ = run_ranks(wrapped_anew, 2, 0, timeout_s=60)[0]
    ours, told = run_ranks(wrapped_anew, 2, zero, timeout_s=60)[0]
    assert same(ours, plain) and "wrapped in another one since" in told


def removed(rank: int, zero: int) -> tuple[bool, bool]:
    """A plan is put on a live training, taken off again, and the training goes on."""

    def script(with_plan):
        ddp = build(Training(), rank)
        optimizer = make_optimizer("adamw", ddp)
        data = torch.Generator().manual_seed(rank)
        losses, found = [], None
        for step in range(9):
            if with_plan and step == 3:
                found = apply(make_plan(2, zero), ddp, optimizer)
            loss = ddp(torch.randint(0, 13, (4, 6), generator=data)).square().mean()
            loss.backward()
            if found is not None and step == 6:
                found.remove()  # with gradients that the step still needs
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        states = {f"{n}.{k}": v for n, s in enumerate(optimizer.state.values()) for k, v in s.items()}
        return losses, {**ddp.state_dict(), **states}, type(ddp.reducer).__name__

    plain, ours = script(False), script(True)
    return plain[0] == ours[0] and plain[2] == ours[2], same(ours[1], plain[1])


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_removed_plan_leaves_whole_tensors(zero):
    assert run_ranks(removed, 2, zero, timeout_s=60) == [(True, True)] * 2
