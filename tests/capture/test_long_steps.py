"""Of a step of many operators the profiler remembers memory alone; its account is that of any other step."""

import gc
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memadvisor
from memadvisor.capture import labels, tracing


class Residual(nn.Module):
    """Gradients meet where it begins; what its layers keep is made again."""

    def __init__(self, channels, is_checkpointed):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1)
        )
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        if self.is_checkpointed:
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + self.layers(x)


def train(directory, num_micro_batches=2):
    """A run of four steps, of which the third is traced."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), Residual(8, True), Residual(8, False), nn.Flatten(), nn.LazyLinear(5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    gc.collect()
    losses = []
    with memadvisor.profile(directory) as profile:
        for _ in range(4):
            for _ in range(num_micro_batches):
                loss = nn.functional.cross_entropy(model(torch.rand(4, 3, 9, 9)), torch.arange(4)) / 4.0
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, profile.run.ranks[0]


def born(rank):
    """What was born in the traced step, but for the operator: the allocator's own events do not name it."""
    return Counter(
        (row.size_bytes, row.category, row.dtype, row.shape, row.module, row.unit, row.phase, row.micro_batch)
        for row in rank.storages
        if row.phase != "baseline"
    )


def changes_bytes(rank):
    """What was allocated and freed in the traced step, in order; a meeting gradient ends before the sum begins."""
    ends = [(row.death_s, -row.size_bytes) for row in rank.storages if row.death_s is not None]
    births = [(row.birth_s, row.size_bytes) for row in rank.storages if row.phase != "baseline"]
    return [size_bytes for _, size_bytes in sorted(ends + births)]


def outcomes(rank):
    return [(row.operator, row.size_bytes) for row in rank.storages if row.shape and row.phase != "baseline"]


@pytest.fixture
def of_any_length(monkeypatch):
    monkeypatch.setattr(tracing, "_NODES_OF_LONG_STEP", -1)


@pytest.fixture
def usual(tmp_path):
    return train(tmp_path / "usual")


def test_the_account_is_that_of_any_step(tmp_path, usual, of_any_length):
    losses, rank = train(tmp_path / "long")

    assert losses == usual[0]
    assert born(rank) == born(usual[1])
    assert changes_bytes(rank) == changes_bytes(usual[1])
    assert outcomes(rank) == outcomes(usual[1])
    assert rank.traced_step.peak_allocated_bytes == usual[1].traced_step.peak_allocated_bytes
    assert {row.unexplained_bytes for row in rank.residuals} == {0}


def test_what_an_operator_makes_for_itself_is_the_dispatched_ones(tmp_path, of_any_length):
    rank = train(tmp_path / "long")[1]
    inside = {row.operator for row in rank.storages if row.operator.startswith("inside ")}

    assert "inside aten::convolution_backward" in inside
    assert {row.removeprefix("inside ") for row in inside} <= {row.name for row in rank.operators}


def test_a_step_is_long_if_the_one_before_made_many_nodes(tmp_path, monkeypatch):
    """Of more operators than are remembered of a usual step, more are."""
    num_operators = len(train(tmp_path / "usual")[1].operators)
    monkeypatch.setattr(labels, "MOST_OPERATORS", num_operators // 2)

    assert train(tmp_path / "none")[1].traced_step is None
    monkeypatch.setattr(tracing, "_NODES_OF_LONG_STEP", 10)
    assert len(train(tmp_path / "long")[1].operators) == num_operators
    monkeypatch.setattr(tracing, "_NODES_OF_LONG_STEP", 1_000)
    assert train(tmp_path / "short")[1].traced_step is None
