"""Which modules of a unit follow each other, each called with nothing but what the one before it returned."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.analyzers.placement import Passes
from memadvisor.analyzers.unit_calls import runs_of
from memadvisor.analyzers.unit_parts import _Trace


class Twice(nn.Linear):
    """May be called with what it is called with once more, as attention is."""

    def forward(self, x, again=None):
        return super().forward(x if again is None else x + again)


class Between(nn.Module):
    """Three layers, and what is done between the first two."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.one, self.two, self.three = nn.Linear(8, 8), Twice(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.between(self.one(x))
        return self.three(self.two(*x) if isinstance(x, tuple) else self.two(x))


class Narrowing(nn.Linear):
    """What it returns is a view already."""

    def forward(self, x):
        return super().forward(x)[:, :4]


def runs(directory, between, first=nn.Linear):
    torch.manual_seed(0)
    model = nn.Sequential(Between(between), nn.Linear(4, 1))
    model[0].one = first(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with memadvisor.profile(directory, trace_step=1) as prof:
        for _ in range(2):
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = _Trace(prof.run.ranks[0], Passes([]), [], set(), set())
    layers = next(
        call.inside
        for calls in trace.calls.values()
        for root in calls
        for call in (root, *root.inside)
        if len(call.inside) == 3
    )
    return ["".join(call.row.module[2] for call in run) for run in runs_of(layers)]


@pytest.mark.parametrize(
    ("between", "found"),
    [
        (lambda x: x.chunk(2, -1)[0], ["o", "tt"]),  # of the same storage, and not the very tensor
        (lambda x: F.relu(x)[:, :4], ["o", "tt"]),
        (lambda x: x.view(12, 4), ["o", "tt"]),
        (lambda x: (x[:, :4], x[:, :4]), ["o", "tt"]),
    ],
)
def test_a_view_of_what_was_returned_is_another_tensor(between, found, tmp_path):
    assert runs(tmp_path / "run", between) == found


def test_what_is_handed_on_as_it_is_may_be_a_view_and_others_may_be_made_beside_it(tmp_path):
    def between(x):
        torch.ones(3).add_(1.0)
        return x

    assert runs(tmp_path / "run", between, Narrowing) == ["ott"]


def test_what_is_written_into_in_between_is_not_as_it_was_returned(tmp_path):
    """The engine sees the tensor's version."""
    assert runs(tmp_path / "run", lambda x: x.add_(2.0), Narrowing) == ["o", "tt"]


def test_what_is_called_with_more_than_was_returned_is_another_part(tmp_path):
    """As attention is, with the same tensor for query, key and value: one storage goes in."""
    assert runs(tmp_path / "run", lambda x: (x, x), Narrowing) == ["o", "tt"]
    assert runs(tmp_path / "other", lambda x: (x, None), Narrowing) == ["o", "tt"]
