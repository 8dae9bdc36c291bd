"""A traced step that fails on the way leaves nothing switched on: no profiler, no mode, no hooks."""

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memadvisor.capture import tracer as module
from memadvisor.capture.census import residents
from memadvisor.capture.position import Position
from memadvisor.capture.tracer import Tracer

CPU = torch.device("cpu")


class Broken(Exception):
    pass


def fail(error):
    raise error


def breaking(*args, **kwargs):
    raise Broken


def assert_all_is_off():
    assert not torch._C._autograd._profiler_enabled()
    assert _get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.distributed.Work.wait.__module__ != "memadvisor.capture.collectives"


@pytest.mark.parametrize("place", ["LabelMode.__enter__", "DefaultHooks", "CollectiveLog.watch"])
def test_one_that_cannot_start(monkeypatch, place):
    owner, _, name = place.rpartition(".")
    monkeypatch.setattr(getattr(module, owner) if owner else module, name, breaking)
    with pytest.raises(Broken):
        Tracer(Position(), CPU, lambda: (), fail=fail, cpu=None)

    assert_all_is_off()


@pytest.mark.parametrize("place", ["make_account", "Named"])
def test_one_that_cannot_end(monkeypatch, place):
    tensor = torch.ones(3)
    tracer = Tracer(Position(), CPU, lambda: [(tensor, "parameter", "")], fail=fail, cpu=None)
    monkeypatch.setattr(module, place, breaking)
    with pytest.raises(Broken):
        tracer.finish()

    assert_all_is_off()


class Talking(torch.Tensor):
    """Runs code of the script's whenever it is asked anything."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Talking.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_looking_for_what_is_alive_asks_no_tensor_of_the_scripts():
    alive = torch.ones(10).as_subclass(Talking)
    Talking.asked = 0
    found = residents([(alive, "parameter", "unit")], CPU, None)

    assert Talking.asked == 0
    assert [row.size_bytes for row in found if row.category == "parameter"] == [40]
