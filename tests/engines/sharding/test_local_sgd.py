"""Local SGD goes torch's way, bit for bit, and ranks average together whoever of them leaves out an update."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from memadvisor.errors import PlanError
from memadvisor.local_sgd import LocalSgd
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan, micro_batch_loss

LOCAL_SGD = LocalSgd(period=3, warmup_steps=2)
STEPS = 9


def torchs_own(ddp, optimizer):
    """Torch averages after its first local step, and then every period; warmed up so much longer, after each period."""
    state = PostLocalSGDState(
        dist.group.WORLD, None, LOCAL_SGD.warmup_steps, post_local_gradient_allreduce=False
    )
    ddp.register_comm_hook(state, post_localSGD_hook)
    warmup_steps = LOCAL_SGD.warmup_steps + LOCAL_SGD.period - 1
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(LOCAL_SGD.period, warmup_steps))


def parameters_of(ddp):
    """DDP brings buffers to all ranks with the next forward."""
    return {name: value.detach().clone() for name, value in ddp.module.named_parameters()}


def learn(rank, training, wrapped=lambda ddp, optimizer: optimizer):
    """Losses of the script, and after each step the weights."""
    ddp = build(training, rank)
    optimizer = wrapped(ddp, make_optimizer(training.optimizer, ddp))
    data = torch.Generator().manual_seed(rank)
    losses, weights = [], []
    for _ in range(STEPS):
        for micro_batch in range(training.accumulate):
            last = micro_batch == training.accumulate - 1
            with ddp.no_sync() if not last else contextlib.nullcontext():
                losses.append(micro_batch_loss(training, ddp, data, use_extra=False))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(parameters_of(ddp))
    return losses, weights


TRAININGS = (
    Training(optimizer="adamw", accumulate=2, model=(("tied", True), ("batch_norm", True))),
    Training(optimizer="sgd", frozen=True),
)


def learn_in_both_ways(rank):
    found = []
    for training in TRAININGS:
        own = learn(rank, training, torchs_own)
        with applied(make_plan(2, local_sgd=LOCAL_SGD)):
            found.append((own, learn(rank, training)))
    return found


def equal(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.timeout(120)
def test_losses_and_weights_are_those_of_torchs_own_post_local_sgd():
    first, second = run_ranks(learn_in_both_ways, 2)
    for (own, ours), (_, others) in zip(first, second, strict=True):
        assert ours[0] == own[0]
        assert all(equal(a, b) for a, b in zip(ours[1], own[1], strict=True))
        alike = [equal(a, b) for a, b in zip(ours[1], others[1], strict=True)]
        assert alike == [True, True, False, False, True, False, False, True, False]


class LeavesOut:
    """An optimizer of the script's that leaves out a step by itself."""

    def __init__(self, optimizer, steps):
        self.optimizer, self.steps, self.count = optimizer, steps, 0

    def step(self):
        self.count += 1
        if self.count not in self.steps:
            self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


class Scaled:
    """A script with a GradScaler whose gradients overflow, and that talks to the other rank after each step."""

    def __init__(self, optimizer, steps):
        self.optimizer, self.steps, self.count = optimizer, steps, 0
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def step(self):
        self.count += 1
        self.scaler.scale(torch.ones(1))
        if self.count in self.steps:
            self.optimizer.param_groups[0]["params"][0].grad.fill_(float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        dist.all_reduce(torch.ones(1))

    def zero_grad(self):
        self.optimizer.zero_grad()


def leave_out(rank):
    training = Training(optimizer="sgd")
    found = {}
    for kind in (LeavesOut, Scaled):
        with applied(make_plan(2, local_sgd=LOCAL_SGD)) as plan:
            steps = {5, 7} if rank else set()  # after the fifth there is an average
            models = []

            def wrapped(ddp, optimizer, kind=kind, steps=steps, models=models):
                models.append(ddp)
                return kind(optimizer, steps)

            weights = learn(rank, training, wrapped)[1]
            plan.remove()
            found[kind.__name__] = [*weights, parameters_of(models[0])]
    return found


@pytest.mark.timeout(120)
def test_a_rank_that_leaves_out_a_step_averages_with_the_others():
    """With a scaler where its step returns, else at the next forward; and all are alike when the engine goes."""
    first, second = run_ranks(leave_out, 2)
    together = {
        name: [
            place
            for place, (a, b) in enumerate(zip(first[name], second[name], strict=True), 1)
            if equal(a, b)
        ]
        for name in first
    }
    assert together == {"Scaled": [1, 2, 5, 8, 10], "LeavesOut": [1, 2, 8, 10]}


def refused(rank):
    with applied(make_plan(2, local_sgd=LOCAL_SGD)):
        ddp = build(Training(), rank)
        with pytest.raises(PlanError) as error:
            torch.optim.LBFGS(ddp.parameters()).step(lambda: 0.0)
        return error.value.one_line()


def test_an_optimizer_that_takes_as_many_passes_as_it_likes_is_refused():
    assert "LBFGS needs gradients that are alike" in run_ranks(refused, 2)[0]
