"""Gradients of which ranks have shards, read and changed by turns: each rank reads what it would under DDP."""

from __future__ import annotations

import time

import pytest
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
