"""What a second run is called with."""

import contextlib

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memadvisor.plan import UnitPlan
from tests.engines.trainings import applied, make_plan


class Attending(torch.nn.Module):
    """Attention projects its query, key and value at once where they are one tensor, so it saves fewer of them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(9, 3, batch_first=True) for _ in range(4)
        )

    def forward(self, x):
        x = x[None]
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x[0]


def losses():
    torch.manual_seed(2)
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        loss = model(torch.randn(5, 9)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("policy", ["every-layer", "sqrt"])
def test_one_tensor_in_several_places_is_one_in_the_second_run(policy):
    plain = losses()
    with applied(make_plan(1, policy=policy)):
        assert losses() == plain


class Holding(torch.nn.Module):
    """Has a tensor in a variable that autograd does not keep, until it returns."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(9, 9), torch.nn.Linear(9, 9)
        self.local = None

    def forward(self, x):
        local = x * 2.0
        self.local = StorageWeakRef(local.untyped_storage())
        return self.down(torch.tanh(self.up(x + local)))


@pytest.mark.parametrize("stretches", [(), (("0", "1"),)])
def test_what_a_second_run_that_is_cut_short_has_in_variables_goes_before_it_counts_as_over(stretches):
    """Who is told of the run would else find it among what that has left for the backward."""
    alive = []

    @contextlib.contextmanager
    def watch(module):
        yield
        alive.append(not module.local.expired())

    alone = [] if stretches else ["0", "1"]
    units = tuple(UnitPlan(name=name, zero_stage=0, recompute=name in alone) for name in ("0", "1"))
    torch.manual_seed(0)
    with applied(make_plan(1, 0, "chosen", units, stretches=stretches)) as found:
        found.recompute.watch = watch
        model = torch.nn.Sequential(Holding(), Holding())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(5, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert len(alive) == 4
    assert not any(alive)


class Wrapping(torch.nn.Module):
    """Ends in a call whose errors come out as others, as libraries that compile expressions to code report them."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)

    def forward(self, x):
        x = self.linear(x)
        try:
            return torch.tanh(x)
        except Exception as error:
            raise ValueError("the call failed") from error


def test_the_end_of_a_second_run_is_no_error_of_the_scripts():
    def train():
        torch.manual_seed(2)
        model = torch.nn.Sequential(Wrapping(), Wrapping())
        model(torch.randn(5, 9)).square().mean().backward()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    plain = train()
    with applied(make_plan(1, policy="every-layer")):
        assert train() == plain


class Joining(torch.nn.Module):
    """Saves a copy of what it is called with; asks, before its backward needs that, whether the first is still there."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.was_there = []

    def forward(self, x):
        storage = StorageWeakRef(x.untyped_storage())
        first = torch.cat([x, x]).sin()
        if not self.was_there:
            first.register_hook(lambda gradient: self.was_there.append(not storage.expired()))
        return (first * self.weight).chunk(2)[0]


def test_what_a_unit_was_called_with_goes_with_its_second_run():
    """Nothing that autograd has saved needs it then."""
    with applied(make_plan(1, units=(UnitPlan(name="1", zero_stage=0, recompute=True),))):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Joining(), torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()

    assert model[1].was_there == [False]
