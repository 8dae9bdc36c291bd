"""torch.jit.trace of a model that is profiled, or trained under a plan: SummaryWriter.add_graph, an export before the training.

What is asked of a tensor's shape while torch watches is an operator of the graph, and a number made of it a warning.
"""

import warnings

import pytest
import torch
from torch import nn

import memadvisor
from tests.engines.trainings import applied, make_plan


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def train(when=0, num_steps=4):
    """Losses, and the graph that is drawn before that step."""
    torch.manual_seed(0)
    model, losses, graph = nn.Sequential(*(Block() for _ in range(3))), [], None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(num_steps):
        if number == when:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.simplefilter("error", torch.jit.TracerWarning)
                graph = str(torch.jit.trace(model, torch.ones(2, 8)).inlined_graph)
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, graph


def nodes(graph):
    """Its operators; names of values count on through a process."""
    return [line.partition("#")[0].split(" = ")[-1].split("(")[0] for line in graph.splitlines()]


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("how", ["profiled", "recomputed", "recomputed and profiled"])
def test_its_graph_and_the_training_are_as_without_us(tmp_path, when, how):
    losses, graph = train(when)
    with memadvisor.profile(tmp_path / "run") if "profiled" in how else warnings.catch_warnings():
        if "recomputed" in how:
            with applied(make_plan(1, policy="every-layer")):
                ours, drawn = train(when)
        else:
            ours, drawn = train(when)

    assert ours == losses
    assert nodes(drawn) == nodes(graph)
