"""torch's planner as a peer: what it has decided is what runs."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import torch_sac


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def make():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 8))
    return nn.Sequential(inner, nn.Linear(8, 4))


def gradients(model):
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    loss = model(x).square().sum()
    with Called() as called:
        loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())], Counter(called.names)


def planned(kept):
    inner, x = make()[0], torch.randn(4, 8)
    with Called() as called:
        inner(x)
    operators = tuple((name, name in kept) for name in called.names)
    return torch_sac.TorchPlan({"0": operators}, peak_bytes=0, step_time_ratio=1.0)


def test_only_what_is_not_kept_runs_again():
    """The first product and the relu that writes into it are kept: the dropout alone draws again, and the same."""
    plain, once = gradients(make())
    for kept, products in ((), 1), (("addmm", "relu_"), 0):
        model = make()
        torch_sac.put_in(planned(kept), model)
        again, twice = gradients(model)
        assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
        assert (twice - once)["addmm"] == products
        assert (twice - once)["bernoulli_"] == 1


def test_an_operator_that_was_not_planned_stops_the_run():
    model = make()
    torch_sac.put_in(planned(()), model)
    model[0].inner[1] = nn.Tanh()

    with pytest.raises(RuntimeError, match="tanh runs where relu_ was planned"):
        gradients(model)
