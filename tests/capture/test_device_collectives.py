"""Operations that a device runs are timed by its marks. The device is a fake one; what is issued goes through Gloo."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from memadvisor.capture import collectives as module
from memadvisor.capture.collectives import CollectiveLog
from memadvisor.capture.label_log import LabelLog
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.position import Position
from memadvisor.capture.rows import collective_rows


def fail(error):
    raise error


class Device:
    """Its stream comes to the n-th mark at 1000 + n seconds, once it `has_run`."""

    def __init__(self):
        self.num_marks = 0
        self.has_run = False

    def mark(self):
        self.num_marks += 1
        at_s = 999.0 + self.num_marks
        return SimpleNamespace(seconds=lambda: at_s if self.has_run else None)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def traced(device, work):
    """The calls that `work` made."""
    log = CollectiveLog(device.mark, fail)
    mode = LabelMode(LabelLog(), log, Position(), torch.device("cpu"), fail)
    log.watch(mode, mode.live_place)
    try:
        with mode:
            work()
    finally:
        log.close()
    return log.calls


def rows(calls):
    return collective_rows(SimpleNamespace(collectives=calls, offset_ns=0), step=0)


def reduce_and_wait():
    dist.all_reduce(torch.ones(4), async_op=True).wait()


@pytest.mark.timeout(60)
def test_start_and_end_are_the_devices_own(group, monkeypatch):
    monkeypatch.setattr(module, "_is_on_device", lambda *_: True)
    device = Device()
    calls = traced(device, reduce_and_wait)
    device.has_run = True
    (row,) = rows(calls)

    assert (row.device_start_s, row.end_s) == (1000.0, 1001.0)
    assert row.wait_end_s is not None


@pytest.mark.timeout(60)
def test_what_the_device_has_not_come_to_has_no_end_although_the_host_has_waited(group, monkeypatch):
    monkeypatch.setattr(module, "_is_on_device", lambda *_: True)
    device = Device()
    calls = traced(device, reduce_and_wait)
    (row,) = rows(calls)

    assert not calls[0].is_over
    assert (row.device_start_s, row.end_s) == (None, None)
    device.has_run = True
    assert calls[0].is_over


@pytest.fixture
def waits_inside(monkeypatch):
    """As NCCL does where it is asked to wait: the method returns no Work."""
    original = dist.ProcessGroup.allreduce
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda *args: original(*args).wait() and None)


@pytest.mark.timeout(60)
def test_what_the_backend_waited_for_itself_has_an_end_and_is_not_asynchronous(
    group, waits_inside, monkeypatch
):
    """FSDP2's reductions over NCCL had none, and no plan was made for such a script."""
    monkeypatch.setattr(module, "_is_on_device", lambda *_: True)
    monkeypatch.setattr(module, "_when_done", lambda *_: None)
    device = Device()
    device.has_run = True
    (row,) = rows(traced(device, lambda: dist.all_reduce(torch.ones(4))))

    assert (row.device_start_s, row.end_s, row.asynchronous) == (1000.0, 1001.0, False)


@pytest.fixture
def gathers_into_one_tensor():
    """`gather_single` (torch 2.14), which of torch's backends NCCL alone has, by Gloo's `gather`."""

    def gather(output, value, group, root, *rest):
        return output, torch.ops.c10d.gather_([[output]], [value], group, root)

    with torch.library._scoped_library("c10d", "IMPL") as library:
        library.impl("gather_into_tensor_", gather, "CPU", allow_override=True)
        yield


@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="new in torch 2.14")
def test_a_gather_into_one_tensor_is_a_gather(group, gathers_into_one_tensor):
    gathered = torch.zeros(4)
    calls = traced(Device(), lambda: dist.gather_single(torch.ones(4), gathered, async_op=True).wait())
    (row,) = rows(calls)

    assert gathered.tolist() == [1.0] * 4
    assert (row.operation, row.size_bytes, row.asynchronous) == ("gather", 16, True)
    assert row.issue_s <= row.wait_start_s <= row.wait_end_s


@pytest.mark.timeout(60)
def test_without_a_callback_the_mark_follows_the_wait(group, monkeypatch):
    monkeypatch.setattr(module, "_is_on_device", lambda *_: True)
    monkeypatch.setattr(module, "_when_done", lambda *_: None)
    device = Device()

    def unwaited_then_waited():
        dist.all_reduce(torch.ones(4), async_op=True)
        reduce_and_wait()

    calls = traced(device, unwaited_then_waited)
    device.has_run = True

    assert [(row.device_start_s, row.end_s) for row in rows(calls)] == [(1000.0, None), (1001.0, 1002.0)]


@pytest.mark.timeout(60)
def test_what_gloo_runs_is_the_hosts(group):
    device = Device()
    calls = traced(device, lambda: (reduce_and_wait(), dist.barrier()))
    for row in rows(calls):
        assert row.device_start_s is None
        assert row.issue_s <= row.end_s
    assert all(call.is_over for call in calls)
