"""Models that a script makes anew once a plan is in force: cross-validation, searches over settings."""

import pytest
import torch
from torch import nn

from memadvisor.plan import UnitPlan
from tests.engines.trainings import Noted, applied, make_plan

NUM_STEPS, NUM_BLOCKS, WIDTH = 3, 2, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(WIDTH, WIDTH), Noted()

    def forward(self, x):
        self.runs.append(None)
        return x + self.linear(x).tanh()


def make_net(num_blocks=NUM_BLOCKS):
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def plan_of_blocks():
    return make_plan(
        1, units=tuple(UnitPlan(name=str(n), zero_stage=0, recompute=True) for n in range(NUM_BLOCKS))
    )


def train(net, optimizer):
    """The losses, and how often a block ran for a step."""
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = net(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, len(net[0].runs) / NUM_STEPS


def new_training(num_blocks=NUM_BLOCKS):
    torch.manual_seed(0)
    net = make_net(num_blocks)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_model_of_the_same_kind_follows_the_plan_too(is_kept):
    plain, _ = train(*new_training())
    kept = []
    with applied(plan_of_blocks()):
        for _ in range(3):
            training = new_training()
            assert train(*training) == (plain, 2)
            kept += [training] if is_kept else []


def test_a_new_optimizer_of_the_same_model_changes_nothing():
    net, optimizer = new_training()
    with applied(plan_of_blocks()):
        assert train(net, optimizer)[1] == 2
        net[0].runs.clear()
        assert train(net, torch.optim.SGD(net.parameters(), lr=0.1))[1] == 2
        assert not torch.nn.modules.module._global_forward_pre_hooks


def test_models_of_another_kind_and_those_that_nobody_trains_are_left_alone():
    with applied(plan_of_blocks()):
        train(*new_training())
        assert train(*new_training(NUM_BLOCKS + 1))[1] == 1
        teacher = make_net()
        teacher(torch.ones(2, WIDTH)).sum().backward()
        assert len(teacher[0].runs) == 1


def test_optimizers_are_made_as_before_once_the_plan_is_taken_off():
    make = torch.optim.Optimizer.__init__
    with applied(plan_of_blocks()):
        assert torch.optim.Optimizer.__init__ is not make
    assert torch.optim.Optimizer.__init__ is make
