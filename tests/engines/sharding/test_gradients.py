"""Gradients of which ranks have shards, read and changed by turns: each rank reads what it would under DDP."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, make_plan, train


def clipped_one_by_one(rank: int) -> dict[int, bool]:
    """As DINO clips: each gradient by its own norm, read before it is scaled and, here, behind that; one rank is slow."""
    seen: list[float] = []

    def clip(ddp: nn.Module, optimizer: object, step: int) -> None:
        for parameter in ddp.parameters():
            time.sleep(0.01 * rank)
            norm = float(parameter.grad.norm())
            seen.append(norm)
            if norm > 0.05:
                parameter.grad.mul_(0.05 / norm)
                seen.append(float(parameter.grad.abs().max()))

    same = {}
    plain = train(Training(steps=2), rank, clip)[0] + seen
    for zero in (2, 3):
        seen.clear()
        with applied(make_plan(2, zero, overlap=True, gather_depth=1)):
            same[zero] = train(Training(steps=2), rank, clip)[0] + seen == pytest.approx(plain, rel=1e-6)
    return same


@pytest.mark.timeout(100)
def test_gradients_are_read_and_scaled_one_after_another_as_under_ddp():
    for same in run_ranks(clipped_one_by_one, 2):
        assert same == {2: True, 3: True}


class Ended(Exception):
    """The script has, on all ranks."""


def read_by_one(rank: int) -> list[str]:
    """What is said on each rank where the first alone reads gradients between changes of them."""
    said = []

    def change(ddp: nn.Module, optimizer: object, step: int) -> None:
        first, second, *_ = ddp.parameters()
        first.grad.mul_(0.5)
        try:
            if rank == 0:
                float(second.grad.norm())
            second.grad.mul_(0.5)
        except PlanError as error:
            said.append(error.one_line())
        raise Ended

    for zero in (2, 3):
        with pytest.raises(Ended), applied(make_plan(2, zero)):
            train(Training(steps=1), rank, change)
    return said


@pytest.mark.timeout(100)
def test_one_rank_that_reads_gradients_between_changes_is_refused():
    first, second = run_ranks(read_by_one, 2)
    assert len(first) == 2 and all("on some ranks between changes of them" in one for one in first)
    assert not second


def _mean_is_zero(gradient: torch.Tensor) -> None:
    gradient.add_(-gradient.mean(dim=-1, keepdim=True))


def _rows(gradient: torch.Tensor) -> None:
    gradient[:3] = 0
    gradient[-1].mul_(0.5)


def _small_to_zero(gradient: torch.Tensor) -> None:
    gradient[gradient.abs() < 1e-2] = 0


def _view(gradient: torch.Tensor) -> None:
    flat = gradient.view(-1)
    flat[::2].zero_()
    flat.add_(0.25)
    gradient.t().mul_(0.5)


def _parts(gradient: torch.Tensor) -> None:
    for part in gradient.chunk(2):
        part.div_(part.norm() + 1)


def _out(gradient: torch.Tensor) -> None:
    torch.clamp(gradient, -1e-2, 1e-2, out=gradient)
    torch.where(gradient > 0, gradient, torch.full((), 0.5), out=gradient)


def _data(gradient: torch.Tensor) -> None:
    gradient.data += torch.linspace(-1, 1, gradient.numel()).view(gradient.shape)
    gradient.data = gradient.data * 2 + 0.25


def _copied(gradient: torch.Tensor) -> None:
    gradient.detach().copy_(gradient / gradient.norm())


def _masked(gradient: torch.Tensor) -> None:
    gradient.masked_fill_(gradient > 0, 0.25)
    gradient.index_fill_(0, torch.tensor([1]), 0.5)


def _noise(gradient: torch.Tensor) -> None:
    gradient.add_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3)), alpha=0.1)


CHANGES = (_mean_is_zero, _rows, _small_to_zero, _view, _parts, _out, _data, _copied, _masked, _noise)


def _all_at_once(ddp: nn.Module) -> None:
    gradients = [parameter.grad for parameter in ddp.parameters()]
    torch._foreach_mul_(gradients, 0.5)
    torch._foreach_add_(gradients, [torch.full_like(parameter, 0.25) for parameter in ddp.parameters()])
    torch._foreach_lerp_(gradients, [parameter.detach() for parameter in ddp.parameters()], 0.1)


def changed_in_many_ways(rank: int) -> list[str]:
    """Which of the changes of gradients make losses and gradients other than under DDP."""
    seen: list[torch.Tensor] = []
    wrong = []
    for how in (*CHANGES, _all_at_once):

        def change(ddp: nn.Module, optimizer: object, step: int, how: object = how) -> None:
            if how is _all_at_once:
                _all_at_once(ddp)
            for parameter in ddp.parameters():
                if how is not _all_at_once and parameter.dim() > 1:
                    how(parameter.grad)
                seen.append(parameter.grad.clone())

        seen.clear()
        losses = train(Training(steps=2), rank, change)[0]
        plain = [*map(torch.Tensor.clone, seen)]
        for zero in (2, 3):
            seen.clear()
            with applied(make_plan(2, zero)):
                same = train(Training(steps=2), rank, change)[0] == pytest.approx(losses, rel=1e-6)
            close = (torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(plain, seen, strict=True))
            if not (same and all(close)):
                wrong.append(f"{how.__name__} with stage {zero}")
    return wrong


@pytest.mark.timeout(200)
def test_gradients_are_changed_as_under_ddp_in_whatever_way():
    """Element by element, by rows and other views of them, as `out`, in lists, and through `data`."""
    assert run_ranks(changed_in_many_ways, 2) == [[], []]


def detached_in_place(rank: int) -> list[bool]:
    """Gradients are no views in the eyes of autograd, as zero_grad of older scripts needs them."""

    def detach(ddp: nn.Module, optimizer: object, step: int) -> None:
        for parameter in ddp.parameters():
            parameter.grad.detach_()

    plain = train(Training(steps=2), rank, detach)[0]
    same = []
    for zero in (1, 2, 3):
        with applied(make_plan(2, zero)):
            same.append(train(Training(steps=2), rank, detach)[0] == pytest.approx(plain, rel=1e-6))
    return same


@pytest.mark.timeout(100)
def test_gradients_are_detached_in_place():
    assert run_ranks(detached_in_place, 2) == [[True] * 3] * 2


def exchanged_and_written(rank: int) -> list[str]:
    said = []

    def change(ddp: nn.Module, optimizer: object, step: int) -> None:
        gradient = next(iter(ddp.parameters())).grad
        try:
            dist.all_reduce(gradient)
        except PlanError as error:
            said.append(error.one_line())
        try:
            gradient.numpy()[...] = 0
        except ValueError as error:
            said.append(str(error))
        raise Ended

    with pytest.raises(Ended), applied(make_plan(2, 2)):
        train(Training(steps=1), rank, change)
    return said


@pytest.mark.timeout(100)
def test_what_cannot_be_kept_is_refused():
    for said in run_ranks(exchanged_and_written, 2):
        assert "changes gradients by allreduce_" in said[0]
        assert "read-only" in said[1]


def held_from_step_to_step(rank: int) -> list[str]:
    """What is said where the script drops gradients and holds them by another name, as they were."""
    said = []

    def look(ddp: nn.Module, optimizer: object, step: int) -> None:
        gradients = [parameter.grad.view(-1)[:1] for parameter in ddp.parameters()]
        for before in held:
            try:
                before.norm()
            except PlanError as error:
                said.append(error.one_line())
                raise Ended from None
        held[:] = gradients

    for zero in (2, 3):
        held: list[torch.Tensor] = []
        with pytest.raises(Ended), applied(make_plan(2, zero)):
            train(Training(steps=2), rank, look)
    return said


@pytest.mark.timeout(100)
def test_gradients_that_are_held_while_others_come_in_their_place_are_refused():
    """They would be the new ones."""
    for said in run_ranks(held_from_step_to_step, 2):
        assert len(said) == 2 and all("no parameter has any more" in each for each in said)
