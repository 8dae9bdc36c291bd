"""The traced step tells of casts that did nothing, and of autocasts that switched off what was not on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memadvisor


class Calling(nn.Module):
    """A layer, and whatever a test does with its result in the model's own forward."""

    def __init__(self, does, dtype=torch.float32):
        super().__init__()
        self.layer, self.does = nn.Linear(16, 32, dtype=dtype), does

    def forward(self, x):
        return self.does(self.layer(x), x)


def recorded(directory, does, *, dtype=torch.float32, around=lambda call: call()):
    model = Calling(does, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(directory) as prof:
        for _ in range(4):
            x = torch.randn(64, 16, dtype=dtype)
            around(lambda x=x: model(x)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run.ranks[0]


CASTS = {
    "float": (lambda y, x: y.float().tanh(), "aten::to"),
    "to": (lambda y, x: y.to(torch.float32).tanh(), "aten::to"),
    "to of a device as well": (lambda y, x: y.to("cpu", torch.float32).tanh(), "aten::to"),
    "type": (lambda y, x: y.type(torch.float32).tanh(), "aten::to"),
    "softmax": (lambda y, x: y.softmax(-1, dtype=torch.float32), "aten::softmax"),
    "log_softmax": (lambda y, x: F.log_softmax(y, -1, dtype=torch.float32), "aten::log_softmax"),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_that_did_nothing_is_told_with_its_tensor(tmp_path, name):
    does, operator = CASTS[name]
    rank = recorded(tmp_path, does)
    (cast,) = rank.idle_casts
    made = next(row for row in rank.storages if row.storage_id == cast.storage_id)
    assert (cast.operator, cast.shape, cast.like_id) == (operator, "[64, 32]", None)
    assert made.operator == "aten::addmm"
    following = next(
        row for row in rank.operators if row.name in ("aten::tanh", "aten::_softmax", "aten::_log_softmax")
    )
    assert made.birth_s < cast.time_s <= following.start_s


def test_a_cast_to_the_dtype_of_another_tells_which(tmp_path):
    rank = recorded(tmp_path, lambda y, x: y.type_as(x).tanh())
    (cast,) = rank.idle_casts
    rows = {row.storage_id: row for row in rank.storages}
    assert cast.operator == "aten::type_as"
    assert rows[cast.storage_id].operator == "aten::addmm"
    assert rows[cast.like_id].shape == "[64, 16]"


OTHERS = {
    "another device or layout": lambda y, x: y.to("cpu").contiguous(),
    "of another dtype": lambda y, x: y.double().float(),
    "of whole numbers": lambda y, x: y * torch.arange(32).float(),
    "inside of an operator": lambda y, x: y.cumsum(0).mean(1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_told_of_other_casts(tmp_path, name):
    """Nor of the one that the script makes outside of its model."""
    assert recorded(tmp_path, OTHERS[name]).idle_casts == ()


def test_nothing_is_told_of_a_model_without_float32(tmp_path):
    assert recorded(tmp_path, lambda y, x: y.float().float(), dtype=torch.bfloat16).idle_casts == ()


def off():
    return torch.autocast("cpu", enabled=False)


def tanh_without(y, x):
    with off():
        y = y.tanh()
    return y.sigmoid()


def test_where_the_script_switches_autocast_off_is_told(tmp_path):
    rank = recorded(tmp_path, tanh_without)
    (region,) = rank.autocast_off
    inside = {row.name for row in rank.operators if region.start_s <= row.start_s < region.end_s}
    assert inside == {"aten::tanh"}


def test_an_autocast_around_the_whole_call_is_none_of_these(tmp_path):
    """As of a script whose `--amp` is not given; a plan's autocast would be inside of it."""

    def around(call):
        with off():
            return call()

    assert recorded(tmp_path / "around", lambda y, x: y.tanh(), around=around).autocast_off == ()
    assert len(recorded(tmp_path / "both", tanh_without, around=around).autocast_off) == 1


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_nor_are_those_of_torch_s_checkpoints(tmp_path, is_reentrant):
    """It puts back what autocast was in the forward, in one of its own."""
    inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def does(y, x):
        return checkpoint(inner, y, use_reentrant=is_reentrant)

    rank = recorded(tmp_path, does)
    assert any(row.phase == "recompute" for row in rank.operators)
    assert rank.autocast_off == ()


def test_counting_them_leaves_torch_s_cache_of_casts_alone(tmp_path):
    """Two products with one weight under the script's own autocast: one copy of it."""

    def does(y, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight) + F.linear(2 * x, weight)

    weight = nn.Parameter(torch.randn(24, 16))
    rank = recorded(tmp_path, does)
    assert (
        sum(
            row.operator == "aten::_to_copy" and row.shape == "[24, 16]" and row.dtype == "bfloat16"
            for row in rank.storages
        )
        == 1
    )


def inflated(kind, directory):
    """A training whose gradients are torch.func's, of a model's call or of a function of its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    weights = dict(model.named_parameters())

    def by_model(weights, x):
        return torch.func.functional_call(model, weights, (x,)).sum()

    def by_hand(weights, x):
        return ((x @ weights["0.weight"].T).relu() @ weights["2.weight"].T).sum()

    with memadvisor.profile(directory) as prof:
        for _ in range(5):
            x = torch.randn(512, 16)
            model(x[:1])
            gradients = torch.func.grad(by_model if kind == "model" else by_hand)(weights, x)
            sum(gradient.pow(2).sum() for gradient in gradients.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run.ranks[0].traced_step


@pytest.mark.parametrize(("kind", "index"), [("model", 2), ("hand", 3)])
def test_a_step_with_transforms_is_traced_without_looking_for_casts(kind, index, tmp_path, monkeypatch):
    """The profiler would hold what is freed; where the first trace alone shows transforms, the next step is traced."""
    step = inflated(kind, tmp_path / "run")
    monkeypatch.setattr("memadvisor.capture.tracer.Tracer._may_be_cast", staticmethod(lambda known: False))

    assert step.index == index
    assert step.peak_allocated_bytes == inflated(kind, tmp_path / "other").peak_allocated_bytes
