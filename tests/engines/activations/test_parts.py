"""Parts of units that run again by themselves: losses stay bitwise those of the plain run."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memadvisor.plan import UnitPlan
from tests.engines.activations.test_stretches import equal
from tests.engines.trainings import applied, make_plan

NUM_BLOCKS, NUM_LAYERS = 3, 6
# No part begins with the layer that writes into its own input, which is then not there to run it again.
CUTS = st.sets(st.sampled_from([0, 1, 3, 4, 5, 6]))


class Body(nn.Module):
    """Layers that draw numbers, keep statistics, and work in place."""

    def __init__(self, dim):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(dim, 2 * dim, bias=False), nn.BatchNorm1d(2 * dim), nn.ReLU(inplace=True)),
            *(nn.Dropout(0.3), nn.Linear(2 * dim, dim), nn.Tanh()),
        )
        self.between = None  # the script's own code after the second layer

    def forward(self, x):
        if self.between is None:
            return x + self.layers(x)
        return x + self.layers[2:](self.between(self.layers[:2](x)))


class Model(nn.Module):
    def __init__(self, between=None):
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Body(6) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(6, 1)
        for block in self.blocks:
            block.between = between

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(bf16=False, twice=False, between=None):
    torch.manual_seed(1)
    model = Model(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(torch.randn(7, 5)).float().square().mean()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def parts_of(block, cuts):
    """The layers between two cuts that follow each other are a part."""
    names = [f"blocks.{block}.layers.{number}" for number in range(NUM_LAYERS)]
    edges = sorted(cuts)
    return tuple(tuple(names[a:b]) for a, b in pairwise(edges))


def plan_of(recomputed, cuts):
    units = tuple(
        UnitPlan(name=f"blocks.{n}", zero_stage=0, recompute=recomputed[n], parts=parts_of(n, cuts[n]))
        for n in range(NUM_BLOCKS)
    )
    return make_plan(1, policy="chosen", units=units)


@given(
    st.lists(st.booleans(), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    st.lists(CUTS, min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_losses_weights_and_running_statistics_are_bitwise_equal(recomputed, cuts, bf16, twice):
    notes = []
    with applied(plan_of(recomputed, cuts), note=lambda level, text: notes.append((level, text))):
        ours = train(bf16, twice)

    assert equal(ours, train(bf16, twice))
    assert not [text for level, text in notes if level == "warning"]


def test_a_part_between_whose_modules_the_script_does_something_keeps_more():
    """With a warning, and nothing of what the script does there is lost."""
    notes = []
    plan = plan_of([True, False, True], [{0, 5}, {0, 6}, {1, 4}])
    with applied(plan, note=lambda level, text: notes.append((level, text))):
        ours = train(between=lambda x: x * torch.sigmoid(x))

    assert equal(ours, train(between=lambda x: x * torch.sigmoid(x)))
    assert sum("keeps more than planned" in text for level, text in notes if level == "warning") == NUM_BLOCKS
