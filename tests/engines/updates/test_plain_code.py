"""A class of the script's own is tried where its code can do nothing elsewhere, and left alone in doubt."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed import all_reduce

from memadvisor.engines.updates.independence import why_not_shared_out
from memadvisor.engines.updates.plain_code import is_plain
from tests.engines import optimizers

LOG: list[float] = []
COUNT = 0
SCALE = 0.5


def norm_of(tensors):
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


class GlobalNorm(optim.Optimizer):
    """All gradients have one norm, as LARS's and others' that scripts bring along."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            scale = SCALE / (1.0 + norm_of([p.grad for p in group["params"] if p.grad is not None]))
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.add_(state["mean"], alpha=-group["lr"] * scale)


class Writes(GlobalNorm):
    def step(self, closure=None):
        with open("/dev/null", "w"):  # noqa: PTH123
            super().step(closure)


class Saves(GlobalNorm):
    def step(self, closure=None):
        torch.save(self.param_groups, "/dev/null")


class Counts(GlobalNorm):
    def step(self, closure=None):
        global COUNT
        COUNT += 1


class Logs(GlobalNorm):
    def step(self, closure=None):
        LOG.append(1.0)


class Shares(GlobalNorm):
    seen: list[float] = []  # noqa: RUF012

    def step(self, closure=None):
        self.seen.append(1.0)


class CountsInItsClass(GlobalNorm):
    count = 0

    def step(self, closure=None):
        self.__class__.count += 1


class Talks(GlobalNorm):
    def step(self, closure=None):
        dist.all_reduce(self.param_groups[0]["params"][0].grad)


class TalksByName(GlobalNorm):
    def step(self, closure=None):
        all_reduce(self.param_groups[0]["params"][0].grad)


class Sets(GlobalNorm):
    def step(self, closure=None):
        torch.set_num_threads(1)


class Imports(GlobalNorm):
    def step(self, closure=None):
        import os

        os.environ["COUNT"] = "1"


class ByAnother(GlobalNorm):
    def step(self, closure=None):
        [logged(group) for group in self.param_groups]


def logged(group):
    LOG.append(group["lr"])


def parameters():
    return torch.nn.Linear(4, 3).parameters()


@pytest.mark.parametrize("kind", [GlobalNorm, optimizers.Lamb, optimizers.ScheduleFree, optimizers.Prodigal])
def test_arithmetic_is_plain(kind):
    assert is_plain(kind(parameters()))


@pytest.mark.parametrize(
    "kind",
    [Writes, Saves, Counts, Logs, Shares, CountsInItsClass, Talks, TalksByName, Sets, Imports, ByAnother],
)
def test_what_may_show_elsewhere_is_not_plain(kind):
    assert not is_plain(kind(parameters()))


def test_what_an_object_holds_beside_numbers_is_not_plain():
    optimizer = GlobalNorm(parameters())
    optimizer.logger = LOG.append
    assert not is_plain(optimizer)


def test_an_onlooker_is_told_of_a_plain_class_of_the_scripts_own_that_looks_at_all_gradients():
    """`advise` had plans of ZeRO for it, which `run` refuses."""
    said = why_not_shared_out(GlobalNorm(parameters()))
    assert said is not None and "by more than that parameter's own gradient" in said
    assert why_not_shared_out(optimizers.Lamb(parameters())) is None
    assert why_not_shared_out(Logs(parameters())) is None and not LOG
