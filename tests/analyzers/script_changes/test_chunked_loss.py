"""A loss of many rows' scores: what chunks of them would save is what a plan with chunks saves."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.analyzers.script_changes.found import changes_of
from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.engines.apply import apply
from memadvisor.plan import Plan

CLASSES, TOKENS = 300, 1024


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)

    def forward(self, words):
        return self.head(self.tokens(words).relu())


def recorded(directory, plan=None):
    gc.collect()
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = None if plan is None else apply(plan, model, optimizer)
    try:
        with memadvisor.profile(directory) as prof:
            for _ in range(4):
                words = torch.randint(CLASSES, (TOKENS,))
                loss = F.cross_entropy(model(words), words)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        if applied is not None:
            applied.remove()
    return prof.run


def test_the_peak_falls_by_what_is_predicted(tmp_path):
    before = recorded(tmp_path / "before")
    change = next(each for each in changes_of(before, before.ranks[0]) if each.kind == "chunked_loss")
    assert f"{TOKENS} x {CLASSES}" in change.seen and "--chunked-loss auto" in change.change
    plan = Plan(num_ranks=1, zero_stage=0, chunked_loss=ChunkedLoss())
    after = recorded(tmp_path / "after", plan)

    was, became = (run.ranks[0].traced_step.peak_allocated_bytes for run in (before, after))
    assert became == pytest.approx(was - change.peak_saved_bytes, rel=0.01)
    assert became < was / 2
