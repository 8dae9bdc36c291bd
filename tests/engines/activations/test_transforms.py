"""Units that a forward also calls under torch.func's transforms are left alone there: no hooks on what is saved are allowed."""

import pytest
import torch
from torch import nn

from memadvisor.plan import UnitPlan
from tests.engines.trainings import applied, make_plan


class Memory(nn.Module):
    """As in Titans: weights of a small model are given each sample's gradient, which trains what surprises are made of."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.read = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x):
        def loss(weights, keys):
            return torch.func.functional_call(self.inner, weights, (keys,)).square().mean()

        surprise = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(self.inner.named_parameters()), x)
        return self.read(self.inner(x)) * sum(each.flatten(1).mean(1) for each in surprise.values())[:, None]


def trained():
    torch.manual_seed(0)
    model = Memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(5, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "inner",
    [
        UnitPlan(name="inner", zero_stage=0, recompute=True),
        UnitPlan(name="inner", zero_stage=0, recompute=False, parts=(("inner.0",),)),
    ],
)
def test_losses_are_bitwise_those_of_the_plain_run(inner):
    plain = trained()
    plan = make_plan(1, policy="chosen", units=(inner, UnitPlan(name="read", zero_stage=0, recompute=True)))
    with applied(plan):
        ours = trained()
    assert ours == plain
