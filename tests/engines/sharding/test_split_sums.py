"""Losses of a micro-batch that is split, under stages 2 and 3 on two ranks: DDP's but for the order of a sum, and of which."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.engines.ranks import run_ranks
from tests.engines.sharding.test_executor import units_of
from tests.engines.trainings import (
    Training,
    applied,
    build,
    largest_difference,
    make_optimizer,
    make_plan,
    micro_batch_loss,
    train,
)

# One whose losses are the same in whatever order gradients are summed, but for rounding.
SPLIT = Training(model=(("dropout", 0.2), ("smooth", True)), accumulate=4, no_sync=True, optimizer="slow sgd")


def averaged_one_by_one(rank: int) -> list[float]:
    """The script, were each micro-batch's gradients averaged over the ranks before they are added up."""
    ddp = build(SPLIT, rank)
    optimizer = make_optimizer(SPLIT.optimizer, ddp)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SPLIT.steps)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(SPLIT.steps):
        sums = [torch.zeros_like(parameter) for parameter in ddp.parameters()]
        for _ in range(SPLIT.accumulate):
            optimizer.zero_grad()
            losses.append(micro_batch_loss(SPLIT, ddp, data, use_extra=(step + rank) % 3 == 0))
            for total, parameter in zip(sums, ddp.parameters(), strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, ddp.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def split(rank: int) -> dict[str, float]:
    """By stage, largest differences of losses: from sums one by one in float32, and from DDP's in float64."""
    found = {}
    precise = replace(SPLIT, dtype="float64")
    one_by_one, (plain, _) = averaged_one_by_one(rank), train(precise, rank)
    for stage, kind, depth in ((2, "", 0), (2, "", 1), (3, "kept", 0), (3, "kept", 1)):
        units = units_of(SPLIT, kind)
        units = tuple(replace(unit, zero_stage=stage) for unit in units)
        plan = make_plan(2, stage, units=units, overlap=depth > 0, gather_depth=depth)
        for name, training, wanted in (("one by one", SPLIT, one_by_one), ("float64", precise, plain)):
            with applied(plan):
                losses, _ = train(training, rank)
            found[f"{name}, stage {stage}, {depth} ahead"] = largest_difference(wanted, losses)
    return found


def test_each_micro_batch_is_averaged_before_it_is_added():
    """In every bit; DDP, which adds before it averages, is as near as rounding is."""
    for found in run_ranks(split, 2, timeout_s=240):
        by_sum = {name: far for name, far in found.items() if name.startswith("one")}
        assert by_sum == dict.fromkeys(by_sum, 0.0)
        assert max(far for name, far in found.items() if name not in by_sum) < 1e-12
