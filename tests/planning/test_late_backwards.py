"""Generators, whose backward comes behind the judge's update: their blocks are in plans, and what is predicted is measured."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.analyzers.late_backwards import with_forwards_of_their_backwards
from memadvisor.analyzers.segments import captured_step
from memadvisor.engines.apply import install


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net(num_inputs, dim, num_outputs, num_blocks):
    blocks = (Block(dim) for _ in range(num_blocks))
    return nn.Sequential(nn.Linear(num_inputs, dim), *blocks, nn.Linear(dim, num_outputs))


class Gan:
    """`passes`: of the judge in a step before the generator's, one for real and made samples together, or one for each."""

    passes = 1

    def __init__(self):
        torch.manual_seed(0)
        self.generator, self.judge = net(8, 32, 16, 4), net(16, 24, 1, 3)
        self.updates = [torch.optim.Adam(model.parameters()) for model in (self.generator, self.judge)]

    def made(self):
        return self.generator(torch.randn(61, 8))

    def step(self):
        made = self.made()
        real = self.judge(torch.rand(61, 16)).sigmoid().log().mean()
        if self.passes == 2:
            (-real).backward()
        fake = F.logsigmoid(-self.judge(made.detach())).mean()
        (-fake if self.passes == 2 else -real - fake).backward()
        self.updates[1].step()
        self.updates[1].zero_grad()
        (-F.logsigmoid(self.judge(made)).mean()).backward()
        self.updates[0].step()
        for update in self.updates:
            update.zero_grad()
        return float(real.detach()), float(fake.detach())

    def run(self):
        gc.collect()  # models of runs before this one that lie in cycles
        return [self.step() for _ in range(5)]


class TwoPasses(Gan):
    passes = 2


class MadeTwice(Gan):
    """With one batch for the judge and another for the generator: the first one's graph is dropped."""

    def step(self):
        made = self.made()
        (-F.logsigmoid(-self.judge(made.detach())).mean()).backward()
        self.updates[1].step()
        loss = -F.logsigmoid(self.judge(self.made())).mean()
        loss.backward()
        self.updates[0].step()
        for update in self.updates:
            update.zero_grad()
        return float(loss.detach())


def recorded(kind, directory, plan=None):
    training = kind()
    applied = None if plan is None else install(plan)
    try:
        with memadvisor.profile(directory) as prof:
            losses = training.run()
    finally:
        if applied is not None:
            applied.remove()
    return prof, losses


@pytest.mark.parametrize("kind", [Gan, TwoPasses])
def test_a_generator_s_blocks_run_again_as_predicted(kind, tmp_path):
    plain, losses = recorded(kind, tmp_path / "plain")
    blocks = {"1", "2", "3", "4"}  # of the generator, which is called first
    plan = next(
        ranked.plan
        for ranked in memadvisor.advise(plain.run, memory=1).plans
        if blocks <= set(ranked.plan.recomputed_units)
    )
    ours, again = recorded(kind, tmp_path / "ours", plan)

    assert blocks <= captured_step(plain.run).recomputable.keys()
    assert again == losses
    assert ours.analysis.ranks[0].peak.allocated_bytes == pytest.approx(plan.prediction.peak_bytes, rel=1e-3)
    assert ours.analysis.ranks[0].peak.allocated_bytes < plain.analysis.ranks[0].peak.allocated_bytes


def test_calls_whose_graph_nobody_goes_back_through_stay_where_they_are(tmp_path):
    rank = recorded(MadeTwice, tmp_path / "run")[0].run.ranks[0]

    assert with_forwards_of_their_backwards(rank) == rank
