"""--memory-limit: the error comes where the limit is passed, and labels are exact while it watches."""

import gc
import weakref

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.capture.cpu_account import open_cpu_account
from memadvisor.capture.memory_watch import MemoryWatch
from memadvisor.capture.position import Position


@pytest.fixture
def account():
    opened = open_cpu_account([])
    if opened is None:
        pytest.skip("this build of torch does not tell its CPU total")
    yield opened
    opened.close([])


@pytest.fixture
def watch(account):
    refused = []
    made = MemoryWatch(Position(), account.allocated_bytes() + 10_000_000, refused.append, pytest.fail)
    made.refused = refused
    made.cpu = account
    made.start()
    yield made
    made.stop()


def test_only_what_grows_past_the_limit_is_refused(watch):
    kept = torch.zeros(2_000_000)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CPU out of memory. Tried to allocate 3\.81 MiB"):
        torch.zeros(1_000_000)
    assert watch.refused[0].requested_bytes == 4_000_000
    view = kept.view(1000, 2000)
    del kept
    assert view.sum() == 0  # an operator of four bytes, below the limit


def test_what_was_refused_is_free_again(watch, account):
    gc.collect()  # what tests before this one left in cycles is not freed in its midst
    before_bytes = account.allocated_bytes()
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(3_000_000)
    gc.collect()
    assert account.allocated_bytes() == before_bytes


def test_what_of_ours_fails_stops_no_operator(watch, monkeypatch):
    told = []
    watch._fail = told.append
    monkeypatch.setattr(watch, "_meet", lambda tensor, func: 1 / 0)

    assert torch.ones(3).add(1).tolist() == [2, 2, 2]
    assert [type(error) for error in told] == [ZeroDivisionError]


def test_a_block_is_forgotten_when_its_storage_is_freed(watch):
    kept = torch.zeros(1000)
    torch.zeros(1000)
    sizes = [size for _, size in watch.blocks(torch.device("cpu"))]
    assert sizes.count(4000) == 1
    del kept
    assert [size for _, size in watch.blocks(torch.device("cpu"))].count(4000) == 0


def test_a_graph_that_no_backward_runs_through_is_freed(watch):
    """A hook that gives autograd an operator's own result back would keep graph and result for ever."""
    weight = torch.randn(10, 10, requires_grad=True)
    result = torch.tanh(weight)
    storage = weakref.ref(result.untyped_storage())
    del result
    assert storage() is None


def test_so_it_is_in_a_traced_step(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    storages = []
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            unused = torch.tanh(model(torch.ones(2, 4)))
            storages.append(weakref.ref(unused.untyped_storage()))
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    del unused
    assert prof.run.ranks[0].traced_step.index == 1
    assert [storage() for storage in storages] == [None] * 3


def test_gradients_are_the_same_with_the_watch():
    def gradients():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))
        parameters = list(model.parameters())
        loss = model(torch.randn(4, 8)).exp().sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), parameters)]

    plain = gradients()
    watch = MemoryWatch(Position(), 2**40, lambda refusal: None, pytest.fail)
    watch.start()
    watched = gradients()
    watch.stop()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
