"""Models that torch.compile has made go on compiled under stages 0 to 2, and are refused in one line under stage 3."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.trainings import applied, make_plan


def trained(rank: int, where: str) -> list[float]:
    """Losses; `where` torch.compile is called: inside DDP, around it, around it in the midst of the training, or around the
    update alone."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
    if where == "inside":
        model = DistributedDataParallel(torch.compile(net, backend="eager", fullgraph=True))
    else:
        model = DistributedDataParallel(net)
        if where == "around":
            model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    update = torch.compile(lambda: optimizer.step(), backend="eager") if where == "update" else optimizer.step
    torch.manual_seed(rank)
    losses = []
    for step in range(4):
        if where == "late" and step == 2:
            model = torch.compile(model, backend="eager")
        words = torch.randn(4, 6)
        loss = (model(words) - words.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        update()
        losses.append(loss.item())
    return losses


def compiled_under_plans(rank: int) -> list[tuple[str, int, list[float], list[float]]]:
    found = []
    for where in ("inside", "around", "late"):
        plain = trained(rank, where)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        for zero in (0, 1, 2):
            with applied(make_plan(dist.get_world_size(), zero, overlap=True)):
                found.append((where, zero, plain, trained(rank, where)))
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # still compiled
    for where in ("inside", "around"):
        with applied(make_plan(dist.get_world_size(), 3)), pytest.raises(PlanError, match="compile"):
            trained(rank, where)
    return found


def compiled_updates_under_plans(rank: int) -> list[tuple[int, list[float], list[float]]]:
    plain = trained(rank, "update")
    found = []
    for zero in (1, 2, 3):
        with applied(make_plan(dist.get_world_size(), zero, overlap=True)):
            found.append((zero, plain, trained(rank, "update")))
    return found


def test_a_step_that_is_compiled_with_its_caller_updates_shards_as_it_does_whole_parameters():
    """As of torch's tutorial on compiled optimizers: Dynamo took the engine into its graph, and ended in an error."""
    for found in run_ranks(compiled_updates_under_plans, 2):
        for zero, plain, ours in found:
            assert ours == plain, zero


def test_compiled_models_train_as_without_a_plan():
    for found in run_ranks(compiled_under_plans, 2):
        assert len(found) == 9
        for where, zero, plain, ours in found:
            assert ours == plain, (where, zero)
