"""What convolutions take for themselves under autocast: by oneDNN, where float32 may do without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.analyzers.autocast.step import required_autocast
from memadvisor.autocast import NarrowConvolution
from memadvisor.autocast_workspaces import workspaces_for
from memadvisor.calibrate.convolution_workspaces import convolution_workspaces
from tests.analyzers.autocast.test_step import peak_bytes


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """With more, oneDNN does 1x1 convolutions of few samples too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PICTURES = {
    "pointwise": (
        lambda: nn.Sequential(nn.Conv2d(12, 24, 1), nn.ReLU(), nn.Conv2d(24, 2, 1)),
        (4, 12, 48, 48),
    ),
    "strided": (lambda: nn.Sequential(nn.Conv2d(12, 24, 1), nn.Conv2d(24, 4, 1, stride=2)), (4, 12, 48, 48)),
    "one sample": (lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 3, 3)), (1, 6, 48, 48)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(12, 20, 1), nn.Tanh(), nn.Conv1d(20, 5, 1)), (4, 12, 900)),
    "many samples": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)),
        (16, 8, 24, 24),
    ),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(4, 12, 1), nn.Conv3d(12, 2, 1)), (2, 4, 12, 12, 12)),
}


def recorded(directory, make, shape, *, by_hand):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(directory, trace_step=1) as prof:
        for _ in range(2):
            x = torch.randn(shape)
            with torch.autocast("cpu", torch.bfloat16, enabled=by_hand):
                loss = model(x).float().square().mean()
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return prof.run


@pytest.mark.parametrize("name", PICTURES)
def test_the_peak_is_that_of_autocast_by_hand(tmp_path, name):
    make, shape = PICTURES[name]
    plain = recorded(tmp_path / "plain", make, shape, by_hand=False)
    by_hand = recorded(tmp_path / "hand", make, shape, by_hand=True)
    predicted = required_autocast(plain.ranks[0], workspaces_for(plain))
    measured = by_hand.ranks[0].traced_step.peak_allocated_bytes

    assert peak_bytes(predicted) == pytest.approx(measured, rel=0.01)


def test_what_no_time_was_left_to_measure_is_not_known(monkeypatch):
    monkeypatch.setattr("memadvisor.calibrate.convolution_workspaces._FLOPS", 1e5)
    small, large = (
        NarrowConvolution((1, 4, size, size), (4, 4, 1, 1), (1, 4, size, size), (1, 1), (0, 0), (1, 1))
        for size in (8, 4096)
    )
    assert convolution_workspaces({small, large}).keys() == {small}
