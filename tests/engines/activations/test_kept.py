"""Units that run again but keep outputs of some operators: losses bitwise those of the plain run, and less is run."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.engines.activations import saved_activations
from memadvisor.engines.activations.kept import KeptOutputs
from memadvisor.engines.activations.second_run import run_keeping_arguments
from memadvisor.plan import UnitPlan
from memadvisor.policies import SELECTIVE
from tests.engines.activations.test_recompute import new_model, regress, stack, train_alone
from tests.engines.trainings import applied, make_plan


class Calls(TorchDispatchMode):
    """Counts the operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(f"aten::{func._schema.name.partition('::')[2]}")
        return func(*args, **(kwargs or {}))


class Rich(torch.nn.Module):
    """Attention, batch norm, dropout, operators in place on a product, on a view of one, and on its own sum."""

    def __init__(self, dim=9):
        super().__init__()
        self.qkv = torch.nn.Linear(dim, 3 * dim)
        self.norm = torch.nn.BatchNorm1d(dim)
        self.dropout = torch.nn.Dropout(0.3)
        self.out = torch.nn.Linear(dim, dim)
        self.gate = torch.nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).view(5, 3, 3, 3, 3).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).reshape(5, 3, 9).reshape(15, 9)
        y = F.relu(self.norm(self.dropout(self.out(mixed))), inplace=True)
        y = self.dropout(self.gate(y).mul_(0.5).sigmoid_()) + mixed
        z = self.out(y)
        z[:, :3] *= 2
        z += x.reshape(15, 9)
        return torch.tanh(z).reshape(x.shape)


NAMES = (
    "addmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "native_batch_norm",
    "empty_like",
    "mul",
    "add",
    "tanh",
    "cat",
    "relu",
    "native_layer_norm",
    "gelu",
    "embedding",
)
ALL = tuple(f"aten::{name}" for name in NAMES)


def keeping(kept, units=("0", "1", "2")):
    return make_plan(
        1, 0, "chosen", tuple(UnitPlan(name=name, zero_stage=0, recompute=True, kept=kept) for name in units)
    )


def train(model, bf16=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = sum(model(torch.randn(5, 3, 9)).square().mean() for _ in range(2))  # casts in the cache
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "kept",
    [
        ALL,
        SELECTIVE,
        ("aten::addmm#0", "aten::addmm#2", "aten::native_batch_norm#0"),
        ("aten::addmm#1", "aten::addmm#3"),
        ("aten::empty_like#0", "aten::empty_like#1"),
        ("aten::empty_like#0",),
        ("aten::empty_like#1", "aten::mul#0"),
    ],
)
def test_losses_weights_and_running_statistics_are_bitwise_equal(kept, bf16):
    plain = train(stack(Rich), bf16)
    with applied(keeping(kept)):
        ours = train(stack(Rich), bf16)
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"batch_norm": True}, {"tied": True, "dropout": 0.1}])
def test_the_policies_selective_and_kwai_on_a_live_model(options, monkeypatch):
    monkeypatch.setattr(saved_activations, "MIN_BYTES", 1)
    plain = train_alone(new_model(**options))
    for plan in (make_plan(1, policy="selective"), make_plan(1, policy="kwai", activation_tier="disk")):
        with applied(plan):
            ours = train_alone(new_model(**options))
        assert ours[0] == plain[0]
        assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])


def run_again(kept, make=Rich, note=lambda level, text: None):
    """What runs in the forward, and of forward's operators in the backward, of one unit in three."""
    with applied(keeping(kept), note=note):
        model = stack(make)
        train(model)
        with Calls() as forward:
            loss = model(torch.randn(5, 3, 9)).square().mean()
        with Calls() as backward:
            loss.backward()
    return forward.names, backward.names


def test_what_is_kept_does_not_run_again_with_what_is_done_in_place_on_it():
    _, everything = run_again(())
    forward, some = run_again(("aten::addmm#0", "aten::addmm#2", "aten::empty_like"))
    count = forward.count
    assert everything.count("aten::addmm") == count("aten::addmm") == 12
    assert some.count("aten::addmm") == 6
    assert some.count("aten::bernoulli_") == 0 and everything.count("aten::bernoulli_") == 6
    assert everything.count("aten::sigmoid_") == 3 and some.count("aten::sigmoid_") == 0


class Closing(torch.nn.Module):
    """Ends with a product of which nothing is saved but what it takes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(9, 18), torch.nn.Linear(18, 9)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)))


def test_what_is_called_after_the_last_tensor_was_saved_is_not_kept():
    """The second run ends there, so nobody would ask for it."""
    torch.manual_seed(0)
    module, x, labelled = Closing(), torch.randn(5, 9, requires_grad=True), []
    kept = KeptOutputs(("aten::addmm#0", "aten::addmm#1"), pytest.fail, labelled.append)
    output = run_keeping_arguments("unit", module, (x,), {}, contextlib.nullcontext, kept)

    assert list(kept.outputs) == [("aten::addmm", 0)]
    assert [tensor.shape for tensor in labelled] == [(5, 18)]
    with Calls() as backward:
        output.square().sum().backward()
    again, module.up.weight.grad = module.up.weight.grad, None
    module(x).square().sum().backward()
    assert torch.equal(again, module.up.weight.grad)
    assert backward.names.count("aten::addmm") == 0


def test_numbers_are_drawn_again_where_a_later_draw_is():
    _, names = run_again(("aten::empty_like#0",))
    assert names.count("aten::bernoulli_") == 6


def test_what_is_changed_after_others_have_read_it_runs_again():
    """The last product is changed in a part of it."""
    _, names = run_again(("aten::addmm#3",))
    assert names.count("aten::addmm") == 12


def test_a_forward_without_the_named_operators_says_so_once_and_is_recomputed():
    notes = []
    plain = train(stack(Rich))
    with applied(keeping(("aten::addmm#0", "aten::addmm#17")), note=lambda level, text: notes.append(text)):
        ours = train(stack(Rich))
    assert ours[0] == plain[0]
    assert len(notes) == 3 and all("aten::addmm#17" in note for note in notes)


class Growing(torch.nn.Module):
    """Calls another number of products each time."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(4))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        for layer in self.layers[: 1 + self.num_calls % 4]:
            x = torch.tanh(layer(x))
        return x


def test_a_model_whose_operators_change_from_step_to_step():
    plain = regress(stack(Growing))
    with applied(keeping(("aten::addmm#1", "aten::tanh#0", "aten::tanh#3"))):
        ours = regress(stack(Growing))
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])


def test_a_graph_that_is_walked_twice_is_run_again_as_a_whole():
    with applied(keeping(("aten::addmm", "aten::empty_like", "aten::tanh"))):
        model = stack(Rich)
        loss = model(torch.randn(5, 3, 9)).square().mean()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_what_is_kept_goes_with_the_graph():
    import gc
    import weakref

    from memadvisor.engines.activations import kept as module

    made = []
    original = module.KeptOutputs.__init__

    def noting(self, *args):
        original(self, *args)
        made.append(weakref.ref(self))

    module.KeptOutputs.__init__ = noting
    try:
        with applied(keeping(ALL)):
            model = stack(Rich)
            loss = model(torch.randn(5, 3, 9)).square().mean()
            assert all(each().outputs for each in made)
            del loss
            gc.collect()
            assert len(made) == 3 and not any(each() for each in made)
    finally:
        module.KeptOutputs.__init__ = original
