"""Who holds, beside autograd, what it keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.capture.holders import Holders
from memadvisor.capture.label_log import LabelLog


def saved(holders, tensor, address):
    """As the pack hook does: an alias of its own, and what stands for it."""
    alias = tensor.data
    return alias, holders.save(alias.untyped_storage(), address)


def test_a_storage_is_held_as_long_as_the_script_has_a_tensor_or_a_view_of_it():
    log = LabelLog()
    holders = Holders(log)
    first, second = torch.ones(3, 4), torch.ones(4)
    kept = [saved(holders, first, 1), saved(holders, first, 1), saved(holders, second, 2)]
    view = first[0]
    del first, second
    holders.look()
    del view
    before_ns = log.held[0].time_ns
    holders.look()

    assert [(held.address, held.time_ns) for held in log.held] == [(1, before_ns)]
    assert len(kept) == 3


def test_where_much_is_held_some_boundaries_go_by_but_none_that_must_not():
    log = LabelLog()
    holders = Holders(log)
    tensors = [torch.ones(1) for _ in range(3000)]
    kept = [saved(holders, tensor, number) for number, tensor in enumerate(tensors)]
    holders.look()
    times = [held.time_ns for held in log.held]
    holders.look()
    assert len(kept) == len(times) == 3000
    assert [held.time_ns for held in log.held] == times
    holders.look(must=True)
    assert all(held.time_ns > time_ns for held, time_ns in zip(log.held, times, strict=True))


class WithLoss(nn.Module):
    """Has in a variable what its head was called with, while it computes the loss by functions."""

    def __init__(self, lets_go):
        super().__init__()
        self.up, self.head, self.lets_go = nn.Linear(16, 32), nn.Linear(32, 500), lets_go

    def forward(self, x):
        hidden = self.up(x)
        logits = self.head(hidden)
        if self.lets_go:
            del hidden
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize("lets_go", [False, True])
def test_what_a_forward_holds_where_no_module_ends_is_seen_at_its_large_operators(tmp_path, lets_go):
    model = WithLoss(lets_go)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path) as prof:
        for _ in range(4):
            model(torch.randn(64, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]
    hidden = next(row for row in rank.storages if row.shape == "[64, 32]" and row.phase == "forward")
    loss = next(row for row in rank.operators if row.name == "aten::_log_softmax")
    assert ((hidden.last_held_s or 0.0) >= loss.start_s) != lets_go


class Pooled(nn.Module):
    """Has a tensor in a variable, of which it has made all that it will, while it goes on."""

    def __init__(self, lets_go):
        super().__init__()
        self.weight, self.lets_go = nn.Parameter(torch.ones(16)), lets_go

    def forward(self, x):
        hidden = (x * self.weight).sin()
        scale = hidden.mean().sigmoid()
        scaled = hidden * scale
        if self.lets_go:
            del hidden
        return scaled.cos() + scaled


@pytest.mark.parametrize("lets_go", [False, True])
def test_what_is_large_for_a_unit_is_looked_at_though_another_one_writes_more(tmp_path, lets_go):
    """As the copies of large weights are that autocast makes, or the first layers of a network of convolutions."""
    model = nn.Sequential(nn.Linear(16, 4096), nn.Linear(4096, 16), Pooled(lets_go), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path) as prof:
        for _ in range(4):
            model(torch.randn(64, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]
    made = {row.name: row for row in rank.operators if row.unit == "2" and row.phase == "forward"}
    hidden = next(row for row in rank.storages if (row.operator, row.phase) == ("aten::sin", "forward"))
    assert ((hidden.last_held_s or 0.0) >= made["aten::add"].start_s) != lets_go
