"""What products of matrices take for themselves under autocast."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import memadvisor
from memadvisor.analyzers.autocast.step import required_autocast
from memadvisor.autocast_workspaces import workspaces_for
from memadvisor.calibrate.product_workspaces import product_workspaces
from tests.analyzers.autocast.test_step import peak_bytes

ROWS, WIDTH = 48, 32


class Layers(torch.nn.Module):
    """Square factors, whose sizes do not tell how they lie, and others; a product of two activations."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*sizes) for sizes in ((WIDTH, ROWS), (ROWS, ROWS), (ROWS, 2 * WIDTH))
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.bmm(x.view(4, -1, 2 * WIDTH), x.view(4, -1, 2 * WIDTH).transpose(1, 2).clone())


def recorded(directory, *, by_hand=False):
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(directory, trace_step=1) as prof:
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH)
            with torch.autocast("cpu", torch.bfloat16, enabled=by_hand):
                y = model(x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("products")
    return recorded(directory / "plain"), recorded(directory / "hand", by_hand=True)


def workspaces(rank):
    products = ("inside aten::mm", "inside aten::addmm", "inside aten::bmm")
    return Counter(
        (row.phase, row.operator, row.size_bytes) for row in rank.storages if row.operator in products
    )


def test_products_take_what_they_take_under_autocast_by_hand(runs):
    """On a processor without products of bfloat16 of its own that is nothing, and nothing is predicted."""
    plain, by_hand = runs
    predicted = required_autocast(plain.ranks[0], workspaces_for(plain))
    assert workspaces(predicted) == workspaces(by_hand.ranks[0])
    measured = by_hand.ranks[0].traced_step.peak_allocated_bytes
    assert peak_bytes(predicted) == pytest.approx(measured, rel=0.02)


def test_each_product_of_forward_and_backward_is_asked_for_by_its_factors(runs):
    """Three layers have three products each, the first one's input none of its own, and the last product two more."""
    asked = set()

    def workspaces_of(products):
        asked.update(products)
        return dict.fromkeys(products, 1000)

    predicted = required_autocast(runs[0].ranks[0], workspaces_of)
    assert sum(workspaces(predicted).values()) == 3 + 2 + 3 + 1 + 2
    square = {product.is_turned for product in asked if {*product.left, *product.right} == {ROWS}}
    assert square == {False, True}
    assert {product.is_turned for product in asked if product.left == (WIDTH, ROWS)} <= {True}


def test_measuring_leaves_torchs_count_of_memory_as_it_was(runs, tmp_path):
    plain, _ = runs
    required_autocast(plain.ranks[0], workspaces_for(plain))
    again = recorded(tmp_path / "again")
    assert again.ranks[0].traced_step.peak_allocated_bytes == plain.ranks[0].traced_step.peak_allocated_bytes


def test_nothing_is_measured_beside_a_profiler_of_the_script():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert product_workspaces(set()) == {}
