"""Optimizer state on disk: the same training in every bit, and one unit's state in memory at a time."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os

import pytest
import torch
from torch import nn

from memadvisor.engines.lanes.disk import DiskFile
from memadvisor.engines.lanes.thread_lane import ThreadLane
from memadvisor.engines.lanes.tiers import HostTier, PinnedMemory, StagedDiskTier
from memadvisor.engines.sharding.late import LateTensor
from memadvisor.errors import PlanError
from tests.engines.allocator import Highest, open_account
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, Training, applied, clipped_gradients, make_optimizer, make_plan
from tests.engines.trainings import train as train_ddp

ON_DISK = make_plan(1, optimizer_tier="disk")


def train(kind="adamw", plan=None, *, steps=6, accumulate=1, each_step=None, model=None, **options):
    """Losses, weights and the optimizer's state dict of a small training, under `plan` if there is one."""
    torch.manual_seed(3)
    model = model or Model(tied=True, batch_norm=True)
    optimizer = make_optimizer(kind, model)
    if plan is not None:
        with applied(plan, **options):
            return _loop(model, optimizer, steps, accumulate, each_step)
    return _loop(model, optimizer, steps, accumulate, each_step)


def _loop(model, optimizer, steps, accumulate, each_step):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        losses += clipped_gradients(model, data, accumulate)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if each_step is not None:
            each_step(model, optimizer, step)
    return losses, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def assert_same(ours, plain):
    assert ours[0] == plain[0]
    torch.testing.assert_close(ours[1], plain[1], rtol=0, atol=0)
    torch.testing.assert_close(ours[2], plain[2], rtol=0, atol=0)
    assert list(ours[2]["state"]) == list(plain[2]["state"])


def late_states(optimizer):
    return [v for s in optimizer.state.values() for v in s.values() if type(v) is LateTensor]


@pytest.mark.parametrize("kind", ["sgd", "groups", "Adam", "Adagrad", "Rprop"])
def test_training_is_the_same_in_every_bit(kind):
    num_late = []
    ours = train(kind, ON_DISK, accumulate=2, each_step=lambda m, o, s: num_late.append(len(late_states(o))))
    assert_same(ours, train(kind, accumulate=2))
    assert min(num_late) >= 20  # all of the state that has a parameter's shape


def test_whatever_reads_the_state_gets_it():
    """torch.save one tensor at a time, a look at a value, a write into one, and a state dict that follows the training."""
    seen = {}

    def look(model, optimizer, step):
        state_dict = optimizer.state_dict()
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        seen[step, "saved"] = torch.load(file)["state"]
        seen[step, "read"] = float(optimizer.state[model.tokens.weight]["exp_avg"].sum())
        optimizer.state[model.scale]["exp_avg"].mul_(0.5)
        seen[step, "follows"] = seen.setdefault("first", state_dict)["state"][0]["exp_avg"].clone()

    ours = train("adamw", ON_DISK, each_step=look)
    found, seen = seen, {}
    assert_same(ours, train("adamw", each_step=look))
    torch.testing.assert_close(found, seen, rtol=0, atol=0)


def test_loaded_state_is_put_away_at_once():
    def reload(model, optimizer, step):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
        counts.append(len(late_states(optimizer)))
        optimizer.load_state_dict(optimizer.state_dict())

    counts = []
    ours = train("adamw", ON_DISK, each_step=reload)
    assert min(counts) == max(counts) >= 40
    assert_same(ours, train("adamw", each_step=reload))


def test_state_that_is_there_before_the_model_is_put_away_too():
    """A resumed script loads it before its first forward."""

    def resume(plan):
        torch.manual_seed(3)
        model = Model()
        optimizer = make_optimizer("adamw", model)
        _loop(model, optimizer, 2, 1, None)
        if plan is None:
            return _loop(model, optimizer, 3, 1, None)
        with applied(plan):
            model(torch.zeros(1, 3, dtype=torch.long))
            assert len(late_states(optimizer)) >= 30
            found = _loop(model, optimizer, 3, 1, None)
            assert late_states(optimizer)
        assert not late_states(optimizer)  # taken off, all is in memory again
        torch.testing.assert_close(optimizer.state_dict(), found[2], rtol=0, atol=0)
        return found

    assert_same(resume(ON_DISK), resume(None))


def test_checkpoints_of_torch_distributed(tmp_path):
    from torch.distributed import checkpoint as dcp

    def save_and_load(model, optimizer, step):
        if step == 1:
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / name, no_dist=True)
        if step == 3:
            state = {"optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)
            optimizer.load_state_dict(state["optimizer"])

    name = "ours"
    ours = train("adamw", ON_DISK, each_step=save_and_load)
    name = "plain"
    assert_same(ours, train("adamw", each_step=save_and_load))


class Fault:
    """What stands for os.pwrite or os.preadv, and fails from the `after`-th call on."""

    def __init__(self, number, original=None, after=1):
        self.number, self.original, self.calls_left = number, original, after - 1

    def __call__(self, *args):
        if not self.calls_left:
            raise OSError(self.number, os.strerror(self.number))
        self.calls_left -= 1
        return self.original(*args)


@pytest.mark.parametrize("after", [1, 60])
def test_a_full_disk_leaves_state_in_memory(monkeypatch, after):
    """In the first step, and later, when buffers are written back."""
    plain = train("adamw")
    monkeypatch.setattr("os.pwrite", Fault(errno.ENOSPC, os.pwrite, after))
    notes = []
    ours = train("adamw", ON_DISK, note=lambda level, text: notes.append((level, text)))
    assert_same(ours, plain)
    assert [level for level, text in notes if "No space left" in text] == ["warning"]


def test_state_that_cannot_be_read_back_ends_the_training(monkeypatch):
    def break_disk(model, optimizer, step):
        if step == 2:
            monkeypatch.setattr("os.preadv", Fault(errno.EIO))

    with pytest.raises(RuntimeError, match=r"unit '.*' cannot be read back from disk: Input/output error"):
        train("adamw", ON_DISK, each_step=break_disk)


@pytest.mark.parametrize("is_staged", [False, True])
def test_the_tiers_of_a_gpu_keep_what_they_are_given(monkeypatch, is_staged):
    """Their logic, with worker threads in the place of streams, and memory that cannot be pinned."""

    def make_tier(lane, device, directory, note):
        host = HostTier(ThreadLane(), ThreadLane(), PinnedMemory(note))
        return StagedDiskTier(DiskFile(directory), host) if is_staged else host

    monkeypatch.setattr("memadvisor.engines.updates.state_offload.make_tier", make_tier)
    assert_same(train("adamw", ON_DISK), train("adamw"))


class Wrapper(torch.optim.Optimizer):
    """Stands before another optimizer, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


def test_an_optimizer_that_wraps_another_is_not_named():
    model, notes = Model(), []
    wrapper = Wrapper(make_optimizer("adamw", model))
    with applied(ON_DISK, note=lambda level, text: notes.append(text)):
        model(torch.arange(6)[None]).sum().backward()
        wrapper.optimizer.step()
        held = [value for state in wrapper.state.values() for value in state.values()]
    assert notes == [] and any(isinstance(value, LateTensor) for value in held)


def test_only_optimizers_that_update_by_element():
    notes = []
    ours = train("Adafactor", ON_DISK, note=lambda level, text: notes.append(text))
    assert_same(ours, train("Adafactor"))
    assert sum("the state of Adafactor stays in memory" in text for text in notes) == 1


def test_hooks_of_the_script_come_before_the_update():
    """What a script's own hook does to gradients counts, and a hook after the step sees the new weights."""

    def scripted(plan):
        torch.manual_seed(3)
        model, seen = Model(), []
        optimizer = make_optimizer("adamw", model)
        optimizer.register_step_pre_hook(lambda o, a, k: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
        optimizer.register_step_post_hook(lambda o, a, k: seen.append(float(model.scale.detach())))
        if plan is None:
            return _loop(model, optimizer, 4, 1, None), seen
        with applied(plan):
            return _loop(model, optimizer, 4, 1, None), seen

    ours, plain = scripted(ON_DISK), scripted(None)
    assert ours[1] == plain[1]
    assert_same(ours[0], plain[0])


def test_on_a_cpu_the_host_is_no_other_tier():
    with pytest.raises(PlanError, match="host's memory already"):
        train("adamw", make_plan(1, optimizer_tier="host"))


def on_ranks(rank, num_ranks):
    """For each stage: the largest difference of losses and weights, and whether the state was away; and coded ones."""
    training, found = Training(optimizer="groups", model=(("tied", True),), steps=5), {}

    def save_and_load(ddp, optimizer, step):
        if step == 2:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file))
        states.append(copy.deepcopy(optimizer.state_dict()["state"]) if step == 4 else None)
        late.append(len(late_states(optimizer)))

    for zero in (None, 0, 1, 2, 3):
        states, late = [], []
        plan = make_plan(num_ranks, zero or 0, overlap=True, gather_depth=1, optimizer_tier="disk")
        with contextlib.nullcontext() if zero is None else applied(plan):
            found[zero] = *train_ddp(training, rank, save_and_load), states[-1], min(late[1:])
    plain = found.pop(None)
    for zero, (losses, weights, state, num_late) in found.items():
        assert losses == plain[0], zero
        torch.testing.assert_close(weights, plain[1], rtol=0, atol=0)
        torch.testing.assert_close(state, plain[2], rtol=0, atol=0)
        found[zero] = num_late
    return found, coded_on_ranks(rank, num_ranks)


def coded_on_ranks(rank, num_ranks):
    """For each stage: losses, how many states are in codes, and whether what is saved is whole; with 8 bits."""
    training, found = Training(optimizer="groups", model=(("dim", 48),), steps=6), {}

    def look(ddp, optimizer, step):
        late.append(len(late_states(optimizer)))
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
            shapes.append([tuple(s["exp_avg"].shape) for s in saved["state"].values()])
            whole = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
            shapes.append([whole[number] for number in saved["state"]])

    for zero in (None, 0, 1, 2, 3):
        late, shapes = [], []
        plan = make_plan(num_ranks, zero or 0, overlap=True, gather_depth=1, optimizer_bits=8)
        with contextlib.nullcontext() if zero is None else applied(plan):
            losses, _ = train_ddp(training, rank, look)
        found[zero] = losses, late[-1], shapes[0] == shapes[1]
    return found


@pytest.mark.timeout(120)
def test_ranks_put_their_own_pieces_away():
    """Stages 0 to 3, with state dicts that are whole on every rank."""
    for found, coded in run_ranks(on_ranks, 2, 2):
        assert list(found) == [0, 1, 2, 3]
        assert min(found.values()) >= 15
        plain, *_ = coded.pop(None)
        for zero, (losses, num_coded, is_whole) in coded.items():
            assert num_coded >= 6 and is_whole, zero
            assert losses != plain and losses == pytest.approx(plain, rel=2e-3), zero


def peak_bytes(plan):
    """Above what is there before the model, from the first step on; and the optimizer's state."""
    torch.manual_seed(0)
    with open_account() as account:
        highest, before = Highest(account), account.allocated_bytes()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        with contextlib.nullcontext() if plan is None else applied(plan), highest:
            for _ in range(3):
                model(torch.ones(1024, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values())
    return highest.size_bytes - before, state


def test_the_peak_drops_by_the_state():
    plain, state = peak_bytes(None)
    ours, _ = peak_bytes(ON_DISK)

    assert plain - ours == pytest.approx(state, rel=0.02)


@pytest.mark.parametrize(
    "plan", [ON_DISK, make_plan(1, 3, optimizer_tier="disk", parameter_tier="disk")], ids=["state", "all"]
)
def test_a_plan_begins_in_the_closure_of_the_first_step(plan):
    """Where a script, as Lightning does, first calls its model."""

    def losses_and_weights():
        torch.manual_seed(3)
        model = Model(tied=True)
        optimizer = make_optimizer("adamw", model)
        data, losses = torch.Generator().manual_seed(0), []

        def closure():
            optimizer.zero_grad()
            losses.extend(clipped_gradients(model, data, 1))
            return losses[-1]

        returned = [optimizer.step(closure) for _ in range(3)]
        return losses, returned, copy.deepcopy(model.state_dict())

    plain = losses_and_weights()
    with applied(plan) as found:
        ours = losses_and_weights()
        assert found.is_attached

    assert ours[:2] == plain[:2]
    torch.testing.assert_close(dict(ours[2]), dict(plain[2]), rtol=0, atol=0)


def test_an_optimizer_that_needs_whole_parameters_calls_its_closure_as_often_as_without_a_plan():
    """LBFGS, several times a step: its state stays in memory."""

    def losses():
        torch.manual_seed(3)
        model, found = Model(), []
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        words = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(0))

        def closure():
            optimizer.zero_grad()
            loss = model(words).square().mean()
            loss.backward()
            found.append(float(loss))
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return found

    plain = losses()
    with applied(ON_DISK):
        assert losses() == plain
