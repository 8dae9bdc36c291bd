"""Checkpoints that the script writes by torch.distributed.checkpoint, and what is in memory meanwhile."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan

NUM_STEPS = 6
SAVED_AT = 3
STAGES = (None, 0, 1, 2, 3)  # None is DDP without us


def steps(rank: int, stage: int | None, first: int, last: int, load: str | None, save: str | None):
    """Losses over all ranks of steps `first` to `last`; the same 12 sequences a step, on however many ranks."""
    num_ranks = dist.get_world_size()
    with contextlib.nullcontext() if stage is None else applied(make_plan(num_ranks, stage)):
        ddp = build(Training(model=(("tied", True),), dtype="float64"), 0)
        optimizer = make_optimizer("groups", ddp)
        if load is not None:
            model, state = get_state_dict(ddp, optimizer)
            dcp.load({"model": model, "optimizer": state}, checkpoint_id=load)
            set_state_dict(ddp, optimizer, model_state_dict=model, optim_state_dict=state)
        losses = []
        for step in range(first, last):
            words = torch.randint(0, 13, (12, 6), generator=torch.Generator().manual_seed(step))
            mine = words.chunk(num_ranks)[rank]
            loss = F.cross_entropy(ddp(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / num_ranks)
        if save is not None:
            model, state = get_state_dict(ddp, optimizer)
            dcp.save({"model": model, "optimizer": state}, checkpoint_id=save)
    return losses


def saved(rank: int, folder: str) -> list[list[float]]:
    whole = steps(rank, None, 0, NUM_STEPS, None, None)
    return [whole, *(steps(rank, stage, 0, SAVED_AT, None, f"{folder}/{stage}") for stage in STAGES)]


def resumed(rank: int, folder: str, pairs: list[tuple[int | None, int | None]]) -> list[list[float]]:
    return [steps(rank, stage, SAVED_AT, NUM_STEPS, f"{folder}/{origin}", None) for origin, stage in pairs]


@pytest.mark.timeout(180)
def test_a_checkpoint_goes_on_in_another_stage_and_on_other_ranks(tmp_path: Path):
    """fp64, so that a mistake cannot hide in the rounding of sums over another number of ranks."""
    whole, *begun = run_ranks(saved, 2, str(tmp_path), timeout_s=60)[0]
    for losses in begun:
        assert losses == pytest.approx(whole[:SAVED_AT], rel=1e-13)
    for num_ranks, pairs in (
        (2, [(3, 2), (1, 3), (3, None)]),
        (3, [(None, 3), (0, 1), (2, 3), (3, 2), (3, None)]),
    ):
        for losses in run_ranks(resumed, num_ranks, str(tmp_path), pairs, timeout_s=60)[0]:
            assert losses == pytest.approx(whole[SAVED_AT:], rel=1e-12)
