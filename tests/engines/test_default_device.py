"""A script that sets a default device: what the engines make for themselves is where they mean it to be.

The default device is one that no value can be read from, so whatever is made on it by mistake raises.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memadvisor.engines.apply import install
from memadvisor.plan import Plan
from tests.engines.ranks import run_ranks


def trained(rank: int, plan: Plan, make_optimizer, device: str | None) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)
    )
    applied = install(plan)
    data = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(rank))
    if plan.num_ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(model.parameters())
    torch.set_default_device(device)
    try:
        losses = []
        for rows in data:
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        torch.set_default_device(None)
        applied.remove()
    return losses


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def muon(parameters):
    return torch.optim.Muon(parameters, lr=0.1)


ONE = Plan(num_ranks=1, zero_stage=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer_tier": "disk"},
        {"optimizer_bits": 8},
        {"activation_tier": "disk"},
        {"activation_bits": 8},
        {"zero_stage": 3, "optimizer_tier": "disk", "parameter_tier": "disk"},
    ],
    ids=str,
)
def test_what_lies_elsewhere(changes):
    plan = replace(ONE, **changes)
    assert trained(0, plan, momentum, "meta") == trained(0, plan, momentum, None)


def ranks(rank: int, stage: int, make_optimizer) -> bool:
    plan = Plan(num_ranks=2, zero_stage=stage, overlap=True)
    return trained(rank, plan, make_optimizer, "meta") == trained(rank, plan, make_optimizer, None)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("stage", "make_optimizer"), [(1, muon), (3, momentum)])
def test_what_ranks_share(stage, make_optimizer):
    assert all(run_ranks(ranks, 2, stage, make_optimizer))
