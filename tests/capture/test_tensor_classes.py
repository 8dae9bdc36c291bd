"""A script may make tensors of its own classes in a step that is traced."""

import torch

import memadvisor
from memadvisor.plan import UnitPlan
from tests.engines.trainings import applied, make_plan


class Labelled(torch.Tensor):
    """Its columns have names, as pina's LabelTensor has."""

    @staticmethod
    def __new__(cls, x, names):
        return super().__new__(cls, x)

    def __init__(self, x, names):
        super().__init__()
        self.names_of_columns = names


class Bare(torch.Tensor):
    pass


class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return Labelled(torch.tanh(self.linear(x.as_subclass(torch.Tensor))), ["column"] * 8)


def train(num_steps=4):
    """Losses, and of what is made in each step: its class, whether it is a view, and what autograd has for it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Unit(), Unit())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, made = [], []
    for _ in range(num_steps):
        x = Labelled(torch.randn(4, 8), ["column"] * 8)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        made += [
            (type(t), t._is_view(), str(t.grad_fn)[:14]) for t in (x, Bare(loss), Bare([1.0]), Bare(2, 3))
        ]
    return losses, made


def test_tensors_of_a_scripts_own_classes_are_made_as_without_the_profiler(tmp_path):
    """The traced step ended in torch's error: the raw tensor was already one of class Tensor."""
    alone = train()
    with memadvisor.profile(tmp_path / "run") as prof:
        profiled = train()

    assert profiled == alone
    assert prof.run.ranks[0].traced_step is not None
    assert "__new__" not in vars(torch.Tensor)
    assert train() == alone


def test_a_unit_that_makes_some_is_run_again_and_keeps_outputs():
    """Its second run ended in the same error."""
    alone = train()
    units = (UnitPlan(name=name, zero_stage=0, recompute=True, kept=("aten::tanh",)) for name in ("0", "1"))
    with applied(make_plan(1, 0, "chosen", tuple(units))):
        ours = train()

    assert ours == alone
    assert "__new__" not in vars(torch.Tensor)
