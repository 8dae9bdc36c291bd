"""A CPU's lane does its work in order, beside the compute, and tells whoever waits how it went."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from memadvisor.engines.lanes.thread_lane import ThreadLane


@pytest.fixture
def lane():
    lane = ThreadLane()
    yield lane
    lane.close()


def test_work_runs_in_order_beside_the_thread_that_submits(lane):
    go, seen = threading.Event(), []
    tickets = [lane.submit(lambda number=number: (go.wait(), seen.append(number))) for number in range(5)]
    assert seen == []  # nobody has waited, and submitting does not
    go.set()
    tickets[-1].wait()
    assert seen == [0, 1, 2, 3, 4]


def test_work_has_none_of_the_scripts_state(lane):
    """Grad mode and autocast are a thread's own; work that the caller does itself has no gradients either."""
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        beside = lane.submit(lambda: (x @ x, torch.is_autocast_enabled("cpu"))).wait()
        at_once = lane.run(lambda: x @ x)
    assert beside[0].grad_fn is None and beside[0].dtype == torch.float32 and not beside[1]
    assert at_once.grad_fn is None


def test_who_waits_frees_the_buffers(lane):
    """The worker's own hold on them ends before it says that it is over: else the moment would be chance's."""
    for _ in range(50):
        staging = torch.empty(1000)
        alive = weakref.ref(staging)
        ticket = lane.submit(lambda staging=staging: staging.fill_(1.0).sum(), writes=(staging,))
        del staging
        gc.collect(0)
        assert alive() is not None
        assert ticket.wait() == 1000.0
        assert alive() is None


def test_a_failure_reaches_who_waits_and_ends_the_lane(lane):
    """What follows on other ranks' lanes does not match what follows here."""

    def fail():
        raise RuntimeError("rank 1 is gone")

    seen = []
    failing, following = lane.submit(fail), lane.submit(lambda: seen.append(1))
    for wait in (failing.wait, failing.wait, following.wait, lambda: lane.run(lambda: seen.append(2))):
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            wait()
    assert seen == []


def test_work_waits_for_another_lanes(lane):
    other, go, seen = ThreadLane(), threading.Event(), []
    first = other.submit(lambda: (go.wait(), seen.append("first")))
    second = lane.submit(lambda: seen.append("second"), after=[first])
    go.set()
    second.wait()
    assert seen == ["first", "second"]
    other.close()


def test_what_is_run_at_once_comes_after_what_is_under_way(lane):
    go, seen = threading.Event(), []
    lane.submit(lambda: (go.wait(), seen.append("submitted")))
    threading.Timer(0.05, go.set).start()
    lane.run(lambda: seen.append("run"))
    assert seen == ["submitted", "run"]


def test_a_thread_ends_with_its_lane():
    lane = ThreadLane()
    lane.submit(lambda: None).wait()
    threads = [thread for thread in threading.enumerate() if thread.name == "memadvisor-transfers"]
    lane.close()
    assert not any(thread.is_alive() for thread in threads[-1:])
    lane = ThreadLane()
    lane.submit(lambda: None).wait()
    threads = [thread for thread in threading.enumerate() if thread.name == "memadvisor-transfers"]
    del lane
    gc.collect()
    assert not threads[-1].is_alive()


@pytest.mark.timeout(30)
def test_a_forked_child_has_a_lane_of_its_own(lane):
    """A DataLoader's worker is a copy without the thread."""
    go = threading.Event()
    lane.submit(go.wait)
    child = os.fork()
    if child == 0:
        os._exit(lane.submit(lambda: 7).wait())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    go.set()


@pytest.mark.timeout(60)
def test_a_process_ends_though_its_lane_never_will():
    """As when a script fails while a transfer waits for a rank that is dead."""
    program = (
        "import threading\nfrom memadvisor.engines.lanes.thread_lane import ThreadLane\n"
        "lane = ThreadLane()\nlane.submit(threading.Event().wait)\nraise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=55).returncode == 3
