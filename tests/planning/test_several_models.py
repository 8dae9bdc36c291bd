"""Scripts with several models: a plan is about those that are trained, follows them by name, and is predicted with the rest."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.engines.apply import install
from memadvisor.errors import PlanError
from memadvisor.plan_file import plan_from_json, plan_to_json
from memadvisor.planning.several_models import _listed


class Block(nn.Module):
    num_runs = 0

    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        Block.num_runs += 1
        Block.last_input = weakref.ref(x)
        return x + self.down(F.gelu(self.up(x)))


def net(num_blocks, dim=32, num_outputs=8):
    blocks = (Block(dim) for _ in range(num_blocks))
    return nn.Sequential(nn.Linear(8, dim), *blocks, nn.Linear(dim, num_outputs))


class Training:
    """A pupil learns from a frozen copy of itself, and a critic with an optimizer of its own learns what the pupil loses."""

    def __init__(self):
        torch.manual_seed(0)
        self.pupil, self.critic = net(4), net(3, 24, 1)
        self.teacher = copy.deepcopy(self.pupil).requires_grad_(False)
        self.optimizers = [
            torch.optim.AdamW(self.pupil.parameters()),
            torch.optim.Adam(self.critic.parameters()),
        ]

    def run(self, num_steps=5):
        """The losses, and how often a block ran."""
        gc.collect()  # models of runs before this one that lie in cycles
        losses, before = [], Block.num_runs
        for _ in range(num_steps):
            x = torch.randn(61, 8)  # a prime number: no micro-batch of it is part of another
            with torch.no_grad():
                wanted = self.teacher(x).softmax(-1)
            lost = F.kl_div(self.pupil(x + 1).log_softmax(-1), wanted, reduction="none").sum(-1)
            guessed = F.mse_loss(self.critic(x).squeeze(-1), lost.detach())
            (lost.mean() + guessed).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append((float(lost.detach().mean()), float(guessed.detach())))
        return losses, Block.num_runs - before


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    training = Training()
    with memadvisor.profile(tmp_path_factory.mktemp("plain") / "run") as prof:
        losses, num_runs = training.run()
    return prof.run, losses, num_runs


@pytest.fixture(scope="module")
def plan(plain):
    """One that recomputes units of both models that are trained."""
    advice = memadvisor.advise(plain[0], memory=1)
    return next(ranked.plan for ranked in advice.plans if len(ranked.plan.recomputed_units) == 7)


def test_the_units_of_a_plan_are_those_of_trained_models_and_all_bytes_stay(plain, plan):
    step = captured_step(plain[0])
    frozen_bytes = sum(p.numel() * p.element_size() for p in Training().teacher.parameters())
    names = {unit.model for unit in plain[0].ranks[0].units}

    assert names == {"", "model1", "model2"}  # in the order of their first calls: teacher, pupil, critic
    assert {unit.model for unit in step.units} == {"model1", "model2"}
    assert [(model.name, model.is_trainable) for model in plan.models] == [("model1", True), ("model2", True)]
    assert step.constant_state_bytes["parameter"] == frozen_bytes
    assert plan_from_json(plan_to_json(plan), "the plan") == plan


def test_a_plan_follows_its_models_and_is_measured_as_predicted(plain, plan, tmp_path):
    _, losses, num_runs = plain
    training = Training()
    applied = install(plan)
    try:
        with memadvisor.profile(tmp_path / "run") as prof:
            ours, num_runs_now = training.run()
    finally:
        applied.remove()

    assert ours == losses
    assert num_runs_now == num_runs + 5 * 7  # blocks of the pupil and the critic, none of the teacher
    assert prof.analysis.ranks[0].peak.allocated_bytes == pytest.approx(plan.prediction.peak_bytes, rel=1e-3)


def test_a_script_that_trains_another_model_is_refused_before_its_first_step(plan):
    training = Training()
    training.critic = net(2, 24, 1)
    training.optimizers[1] = torch.optim.Adam(training.critic.parameters())
    before = copy.deepcopy(training.critic.state_dict())
    training.optimizers.reverse()
    applied = install(plan)
    try:
        with pytest.raises(PlanError, match=r"for other models: .*model1 .* and model2"):
            training.run()
    finally:
        applied.remove()
    assert all(torch.equal(value, before[name]) for name, value in training.critic.state_dict().items())


def test_nothing_is_held_of_the_second_runs_of_a_model_that_is_trained_before_the_others_are_met(plan):
    training = Training()
    applied = install(plan)
    try:
        training.critic(torch.randn(61, 8)).sum().backward()
        assert Block.last_input() is None
    finally:
        applied.remove()


def test_no_unit_of_a_plan_is_of_no_model(plan):
    strange = dataclasses.replace(plan, models=plan.models[:1])
    with pytest.raises(PlanError, match="of none of its models"):
        install(strange)


@pytest.mark.parametrize(
    ("num_models", "words"),
    [(1, "a"), (2, "a and b"), (3, "a, b and c"), (5, "a, b, c, d and e"), (22, "a, b, c, d and 18 more")],
)
def test_models_are_listed_and_of_many_the_first(num_models, words):
    """Each layer of Keras's is a model, and the note had "and" between 22 of them."""
    assert _listed([chr(ord("a") + number) for number in range(num_models)]) == words
