"""What is kept of a thread's state by work of a process group is nothing of ours."""

import gc

import pytest
import torch
import torch.distributed as dist

import memadvisor
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.memory_watch import MemoryWatch
from memadvisor.capture.position import Position
from memadvisor.capture.saved_hooks import SavedTensorHooks
from memadvisor.own_hooks import own_hooks_aside
from memadvisor.run.living import living


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pack_of_ours(tensor):
    return tensor


pack_of_ours.__module__ = "memadvisor.anything"


def top():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def test_work_of_the_traced_step_keeps_none_of_our_objects(group, tmp_path):
    """Else Gloo's thread would need the GIL to let go of it, and may be waited for by who holds the GIL."""
    model, works = torch.nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters())
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            works.append(dist.all_reduce(torch.ones(3), async_op=True))
            optimizer.step()
    gc.collect()

    assert len(prof.run.ranks[0].collectives) == 1
    assert living(LabelMode) == living(SavedTensorHooks) == []


def test_work_of_a_watched_step_keeps_none_either(group):
    watch = MemoryWatch(Position(), 2**40, lambda refusal: None)
    watch.start()
    try:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    finally:
        watch.stop()
    del watch
    gc.collect()

    assert work.is_completed() or work.wait()
    assert living(MemoryWatch) == []


def test_hooks_of_ours_come_back_and_those_above_the_scripts_alone_go():
    with torch.autograd.graph.saved_tensors_hooks(abs, abs):
        with torch.autograd.graph.saved_tensors_hooks(pack_of_ours, abs):
            with own_hooks_aside():
                assert top() == (abs, abs)
            assert top() == (pack_of_ours, abs)
        with own_hooks_aside():
            assert top() == (abs, abs)
