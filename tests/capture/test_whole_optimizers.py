"""Optimizers that no rank can have a part of are told of, and the training does not notice that they were tried."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.engines.updates import independence
from tests.engines import optimizers


def train(make) -> tuple[list[float], list[object]]:
    """Losses, and what the random generators give next."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    losses = []
    for _ in range(5):
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [torch.rand(3).tolist(), random.random()]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            optimizers.Prodigal,
            "ZeRO stages 1 to 3 cannot share out Prodigal: it updates a parameter by more than",
        ),
        (optimizers.Lamb, None),
        (torch.optim.AdamW, None),
    ],
)
def test_whether_ranks_could_share_an_optimizer_out(tmp_path, monkeypatch, capsys, make, said):
    monkeypatch.setattr(independence, "_is_installed", lambda kind: True)
    plain = train(make)
    capsys.readouterr()
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        profiled = train(make)

    assert profiled == plain
    assert capsys.readouterr().out == ""
    found = prof.run.ranks[0].process.whole_optimizer
    assert found is None if said is None else found.startswith(said)
    assert len(prof.run.ranks[0].steps) == 5


LOG: list[float] = []


class Logs(optimizers.Prodigal):
    def step(self, closure=None):
        LOG.append(1.0)
        return super().step(closure)


@pytest.mark.parametrize(("make", "is_tried"), [(optimizers.Prodigal, True), (Logs, False)])
def test_an_optimizer_of_the_scripts_own_is_tried_where_its_code_does_no_more_than_update(
    tmp_path, make, is_tried
):
    """It may count, or write into a file."""
    LOG.clear()
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        train(make)

    assert (prof.run.ranks[0].process.whole_optimizer is not None) == is_tried
    assert len(LOG) in (0, 5)
