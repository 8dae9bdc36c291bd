"""Work of a process group keeps none of our saved-tensor hooks, and torch's checkpoints find none of them."""

import contextlib
import gc
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as checkpoint

import memadvisor
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.memory_watch import MemoryWatch
from memadvisor.capture.position import Position
from memadvisor.capture.saved_hooks import SavedTensorHooks
from memadvisor.engines.apply import apply
from memadvisor.own_hooks import own_hooks_aside, unseen_by_checkpoints
from memadvisor.run.living import living
from tests.engines.trainings import make_plan


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
    watch = MemoryWatch(Position(), 2**40, lambda refusal: None, pytest.fail)
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


def keep_products(context, operator, *args, **kwargs):
    is_product = operator is torch.ops.aten.addmm.default
    return (
        checkpoint.CheckpointPolicy.MUST_SAVE if is_product else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    )


class Selective(torch.nn.Sequential):
    """A block in a selective checkpoint of the script's own."""

    def __init__(self):
        super().__init__(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))

    def forward(self, value):
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, keep_products)
        return checkpoint.checkpoint(super().forward, value, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def profiled(directory, model, optimizer):
    with memadvisor.profile(directory, trace_step=1):
        yield


@contextlib.contextmanager
def watched(directory, model, optimizer):
    watch = MemoryWatch(Position(), 2**40, lambda refusal: None, pytest.fail)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


@contextlib.contextmanager
def planned(directory, model, optimizer):
    applied = apply(make_plan(1, activation_tier="disk"), model, optimizer)
    try:
        yield
    finally:
        applied.remove()


def losses_of(directory, around):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"blocks": torch.nn.Sequential(Selective(), Selective())})
    model.forward = model["blocks"].forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with around(directory, model, optimizer):
        for _ in range(3):
            loss = model(torch.ones(64, 32)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("around", (profiled, watched, planned))
def test_selective_checkpoints_do_not_warn_of_hooks_that_the_script_has_not_set(around, tmp_path):
    plain = losses_of(tmp_path, lambda *_: contextlib.nullcontext())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert losses_of(tmp_path, around) == plain


@pytest.mark.skipif(
    not hasattr(checkpoint, "_current_user_saved_tensors_hooks"), reason="torch 2.14 asks first"
)
def test_checkpoints_find_the_scripts_hooks_under_ours_until_the_last_of_ours_is_gone():
    original = checkpoint._current_user_saved_tensors_hooks
    first, second = unseen_by_checkpoints(), unseen_by_checkpoints()
    with (
        torch.autograd.graph.saved_tensors_hooks(abs, abs),
        torch.autograd.graph.saved_tensors_hooks(pack_of_ours, abs),
    ):
        first()
        assert checkpoint._current_user_saved_tensors_hooks() == (abs, abs)
        second()
        assert checkpoint._current_user_saved_tensors_hooks() == (pack_of_ours, abs)
    assert checkpoint._current_user_saved_tensors_hooks is original
