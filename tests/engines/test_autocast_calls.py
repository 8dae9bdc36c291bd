"""A plan's forwards under autocast, on scripts in float32: bit for bit what autocast written by hand gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memadvisor.errors import PlanError
from memadvisor.plan import UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.precision import Precision
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, applied, make_plan

BF16 = make_plan(1, autocast="bf16")
WORDS = 13


def by_hand(model, device="cpu"):
    """A call of the model as accelerate prepares it."""

    def call(*args, **kwargs):
        with torch.autocast(device, torch.bfloat16):
            output = model(*args, **kwargs)
        return output.float()

    return call


def steps(model, optimizer, call, count=3, accumulate=2, rank=0):
    """Losses and accuracies of a script that knows nothing of autocast, with an evaluation in between."""
    torch.manual_seed(5)
    data, found = torch.Generator().manual_seed(rank), []
    for _ in range(count):
        for _ in range(accumulate):
            words = torch.randint(WORDS, (4, 7), generator=data)
            scores = call(words[:, :-1])
            assert scores.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
            loss = F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()) / accumulate
            loss.backward()
            found.append(float(loss.detach()))
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(float(call(words).sum()))
        model.train()
    return found


def new(**how):
    torch.manual_seed(3)
    model = Model(**{"batch_norm": True, "dropout": 0.1, **how})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(plan, **how):
    model, optimizer = new(**how)
    notes: list[str] = []
    with applied(plan, note=lambda level, text: notes.append(text)):
        losses = steps(model, optimizer, model)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    return losses, copy.deepcopy(model.state_dict()), [text for text in notes if "plan's autocast" in text]


def trained_by_hand(**how):
    model, optimizer = new(**how)
    return steps(model, optimizer, by_hand(model)), copy.deepcopy(model.state_dict()), []


def are_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("how", [{}, {"tied": True}, {"checkpointed": True}], ids=str)
@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"policy": "every-layer"},
        {"policy": "sqrt"},
        {"policy": "selective"},
        {"activation_tier": "disk"},
        {"optimizer_tier": "disk"},
        {"fused_updates": True},
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_autocast_by_hand(beside, how):
    theirs = trained_by_hand(**how)
    if "fused_updates" in beside:
        with applied(make_plan(1, **beside)):
            theirs = trained_by_hand(**how)
    are_equal(trained(make_plan(1, autocast="bf16", **beside), **how), theirs)


def ranks_train(rank, zero, policy):
    found = []
    for is_ours in (True, False):
        torch.manual_seed(3)
        model = Model(batch_norm=True, dropout=0.1)
        plan = make_plan(2, zero, policy, autocast="bf16" if is_ours else None, overlap=True)
        with applied(plan):
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
            found.append(steps(ddp, optimizer, ddp if is_ours else by_hand(ddp), rank=rank))
    return found


@pytest.mark.parametrize("policy", ["none", "every-layer"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_train_as_with_autocast_by_hand(zero, policy):
    for ours, theirs in run_ranks(ranks_train, 2, zero, policy):
        assert ours == theirs


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(1, autocast="fp16"), "needs a loss scaler"),
        (make_plan(1, autocast="int8"), "autocast 'int8'"),
        (make_plan(2, 3, autocast="bf16"), "ZeRO stage 3 of all units"),
        (
            make_plan(2, 3, "chosen", (UnitPlan(name="a", zero_stage=3, recompute=False),), autocast="bf16"),
            "ZeRO stage 3 of 'a'",
        ),
        (make_plan(2, 3, precision=Precision(param_dtype="bfloat16"), autocast="bf16"), "param_dtype"),
        (make_plan(2, 3, executor="fsdp2", autocast="bf16"), "FSDP2"),
        (
            make_plan(1, 3, parameter_tier="disk", optimizer_tier="disk", autocast="bf16"),
            "parameters on host or disk",
        ),
    ],
)
def test_what_it_cannot_be_done_with_is_refused_in_one_line(plan, message):
    with pytest.raises(PlanError, match=message) as refused:
        check_plan(plan, "This plan")
    assert refused.value.hint and "\n" not in refused.value.one_line()
