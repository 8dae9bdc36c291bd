"""Forwards that models run in their `__init__`, layer by layer, to learn shapes."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import memadvisor
from memadvisor.in_making import is_in_making
from tests.engines.trainings import Noted, applied, make_plan

NUM_LAYERS, NUM_STEPS = 20, 4  # more layers than models are searched for


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.SiLU())
        self.runs = Noted()

    def forward(self, x):
        self.runs.append(None)
        return super().forward(x)


class Net(nn.Module):
    def __init__(this, learns_width=True):
        super().__init__()
        this.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        this.width = this.pass_through(torch.zeros(1, 8)).shape[-1] if learns_width else 8

    def pass_through(this, x):
        for layer in this.layers:
            x = layer(x)
        return x

    def forward(this, x):
        return this.pass_through(x).square().mean()


class Asking(nn.Module):
    def forward(self, x):
        self.answer = is_in_making(self)
        return x


def train(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        net(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_only_parts_of_what_is_being_made_are_in_making():
    class Making(nn.Module):
        def __init__(self, part, other):
            super().__init__()
            self.part = part
            part(torch.ones(1)), other(torch.ones(1))

    class Trainer:
        def __init__(self, part):
            self.part = part
            part(torch.ones(1))

    part, other = Asking(), Asking()
    Making(part, other)
    assert part.answer
    assert not other.answer
    Trainer(part)
    assert not part.answer


def test_layers_that_are_called_in_init_are_no_models_of_their_own(tmp_path):
    with memadvisor.profile(tmp_path / "run") as prof:
        Net()  # made, and never trained
        train(Net())

    rank = prof.run.ranks[0]
    assert [unit.name for unit in rank.units if unit.name] == [f"layers.{n}" for n in range(NUM_LAYERS)]
    assert {step.num_samples for step in rank.steps} == {4}
    assert not rank.notes


def test_a_model_around_many_that_were_called_alone_takes_their_place(tmp_path):
    """Layer by layer, as before a training that warms up the parts: each was a model, and so they stayed."""
    with memadvisor.profile(tmp_path / "run") as prof:
        net = Net(learns_width=False)
        net.pass_through(torch.zeros(1, 8))
        train(net)

    assert {unit.model for unit in prof.run.ranks[0].units} == {""}
    assert {row.name for row in prof.run.ranks[0].parameters} == {name for name, _ in net.named_parameters()}


def test_a_parametrized_weight_that_is_looked_at_is_no_model():
    with applied(make_plan(1, policy="every-layer")):
        net = Net()
        weight_norm(net.layers[0][0])
        assert net.layers[0][0].weight.requires_grad
        num_before = len(net.layers[1].runs)
        train(net)

    assert len(net.layers[1].runs) - num_before == 2 * NUM_STEPS


@pytest.mark.parametrize("learns_width", [True, False])
def test_a_plan_made_by_hand_is_for_the_model_and_not_for_its_first_layer(learns_width):
    with applied(make_plan(1, policy="every-layer")):
        net = Net(learns_width)
        num_before = len(net.layers[0].runs)
        train(net)

    assert len(net.layers[0].runs) - num_before == 2 * NUM_STEPS
