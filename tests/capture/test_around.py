"""Optimizers that step inside a module's call: a trainer that is a module, a step that is a forward, a layer that fits."""

import pytest
import torch
from torch import nn

import memadvisor

NUM_STEPS, BATCH, WIDTH = 5, 6, 16


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))


class Trainer(nn.Module):
    """Its forward runs the whole loop. Hidden, the model is none of its parts."""

    def __init__(self, is_hidden):
        super().__init__()
        self.nets = [layers()] if is_hidden else nn.ModuleList([layers()])
        self.optimizer = torch.optim.AdamW(self.nets[0].parameters())

    def forward(self):
        for _ in range(NUM_STEPS):
            self.take_step()

    def take_step(self):
        self.nets[0](torch.randn(BATCH, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Stepping(Trainer):
    """Its forward is one step of two updates, as Lightning's `training_step` under DistributedDataParallel."""

    def __init__(self):
        super().__init__(is_hidden=False)
        self.other = layers()
        self.its_optimizer = torch.optim.AdamW(self.other.parameters())

    def forward(self):
        self.take_step()
        self.other(torch.randn(BATCH, WIDTH)).square().mean().backward()
        self.its_optimizer.step()
        self.its_optimizer.zero_grad()


class Fitting(nn.Module):
    """A layer that fits a scale of its own in each forward."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x):
        scale = torch.ones(WIDTH, requires_grad=True)
        optimizer = torch.optim.SGD([scale], lr=0.1)
        (x.detach() * scale).square().mean().backward()
        optimizer.step()
        return self.layers(x * scale.detach())


def recorded(path, run):
    with memadvisor.profile(path) as prof:
        run()
    return prof.run.ranks[0]


def num_forwards(rank):
    """Of each steady step, and what they took in."""
    spans = [(span.step, span.kind) for span in rank.spans]
    return {(spans.count((step.index, "forward")), step.num_samples) for step in rank.steps[1:]}


@pytest.mark.parametrize(("is_hidden", "prefix"), [(False, "nets.0."), (True, "")])
def test_what_a_trainers_forward_calls_is_the_model(tmp_path, is_hidden, prefix):
    rank = recorded(tmp_path / "run", Trainer(is_hidden))

    assert len(rank.steps) == NUM_STEPS
    assert num_forwards(rank) == {(1, BATCH)}
    assert {unit.name for unit in rank.units} >= {f"{prefix}{number}" for number in range(3)}
    assert {row.phase for row in rank.operators} == {"forward", "outside", "backward", "optimizer"}
    assert not rank.notes


def test_a_step_inside_a_forward_has_the_forwards_of_what_it_calls(tmp_path):
    model = Stepping()
    rank = recorded(tmp_path / "run", lambda: [model() for _ in range(NUM_STEPS)])

    assert len(rank.steps) == NUM_STEPS
    assert num_forwards(rank) == {(2, BATCH)}
    assert not rank.notes


def test_a_layer_that_fits_something_of_its_own_stays_part_of_the_forward(tmp_path):
    model = nn.Sequential(Fitting(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def run():
        for _ in range(NUM_STEPS):
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    rank = recorded(tmp_path / "run", run)
    assert {row.unit for row in rank.spans if row.kind == "forward"} == {""}
