"""A model whose own layers bring ranks together, forward and backward: theirs and the engine's stay in one order."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memadvisor.plan import UnitPlan
from tests.engines.ranks import run_ranks
from tests.engines.trainings import applied, make_plan

DIM, BLOCKS = 12, 3


class SumOfRanks(torch.autograd.Function):
    """What all ranks have of a tensor, added up, and of its gradient: as SyncBatchNorm's statistics are."""

    @staticmethod
    def forward(ctx, values):
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SyncedNorm(nn.Module):
    """torch's own SyncBatchNorm refuses tensors of a CPU."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))
        self.register_buffer("running_mean", torch.zeros(DIM))

    def forward(self, x):
        moments = torch.cat([x.mean(0), x.square().mean(0)])
        mean, square = (SumOfRanks.apply(moments) / dist.get_world_size()).chunk(2)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
        return (x - mean) * torch.rsqrt(square - mean.square() + 1e-5) * self.weight + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.act, self.down = (
            nn.Linear(DIM, DIM),
            SyncedNorm(),
            nn.GELU(),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x):
        return x + self.down(self.act(self.norm(self.up(x))))


def trained(rank: int) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    data, losses = torch.Generator().manual_seed(rank), []
    for _ in range(4):
        loss = ddp(torch.randn(6, DIM, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [tensor.clone() for tensor in model.state_dict().values()]


def plans(num_ranks: int):
    parts = tuple(
        UnitPlan(name=str(n), zero_stage=2, recompute=n == 1, parts=((f"{n}.norm", f"{n}.act"),))
        for n in range(BLOCKS)
    )
    yield make_plan(num_ranks, 0, "every-layer")
    yield make_plan(num_ranks, 1, overlap=True, update_by_unit=True)
    yield make_plan(num_ranks, 2, "chosen", parts, overlap=True)
    yield make_plan(num_ranks, 3, "every-layer", overlap=True, gather_depth=2)


def under_plans(rank: int) -> list[bool]:
    losses, states = trained(rank)
    found = []
    for plan in plans(dist.get_world_size()):
        with applied(plan):
            ours, ours_states = trained(rank)
        if dist.get_world_size() == 2:
            found.append(ours == losses and all(map(torch.equal, ours_states, states)))
        else:  # sums are in another order
            found.append(torch.allclose(torch.tensor(ours), torch.tensor(losses), rtol=1e-6, atol=0))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_layers_that_sum_over_ranks_compute_the_same_under_every_stage(num_ranks):
    """Also in a second run, of a block or of a part of it, where that is done again by all ranks."""
    for found in run_ranks(under_plans, num_ranks):
        assert found == [True] * 4
