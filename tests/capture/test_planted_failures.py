"""Whatever of ours fails, wherever the training stands, it goes on as if we had never been: a table of failures."""

import importlib
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import memadvisor
from memadvisor.capture import truth
from memadvisor.capture.recorder import Recorder

# What fails, and at which of its calls. What hooks and modes call first, what these call, and what ends a traced step.
_PLACES = [
    *[("labels", "LabelMode._glance", at) for at in (1, 25, 60)],
    *[("labels", "LabelMode._glance_at_view", at) for at in (1, 20)],
    *[("labels", "LabelMode._look", at) for at in (1, 8)],
    *[("labels", "LabelMode._place_of_node", at) for at in (1, 30)],
    *[("labels", "LabelMode.name", at) for at in (1, 20)],
    ("labels", "arithmetic_of", 2),
    ("labels", "learn", 1),
    *[("saved_hooks", "SavedTensorHooks._row", at) for at in (1, 4)],
    ("holders", "Holders.save", 3),
    *[("holders", "Holders.look", at) for at in (5, 12)],
    *[("models", "Models.info", at) for at in (1, 14, 30)],
    *[("module_calls", "ModuleCallLog.enter", at) for at in (1, 2, 9)],
    *[("module_calls", "ModuleCallLog.leave", at) for at in (1, 6)],
    *[("spans", "SpanLog.enter_backward", at) for at in (1, 4)],
    ("spans", "SpanLog.reach_backward_of", 3),
    ("updates", "Updates.enter", 3),
    ("updates", "Updates.leave", 3),
    ("data_waits", "DataWaits._is_evaluation", 3),
    ("tracer", "Tracer._start_layers", 1),
    ("tracer", "make_account", 1),
    ("tracing", "take_snapshot", 1),
    ("writer", "RankWriter.write_trace", 1),
    ("closed_step", "ClosedStep.rows", 2),
]


class Planted(Exception):
    pass


class TanhOfTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        twice = x * 2
        ctx.save_for_backward(twice)
        return twice.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (twice,) = ctx.saved_tensors
        return gradient * 2 * (1 - twice.tanh() ** 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(TanhOfTwice.apply(self.linear(x)))


class Model(nn.Module):
    """Its first block is called by a function's forward, and of the last one its own hooks say what is kept."""

    def __init__(self):
        super().__init__()
        self.blocks, self.kept = nn.ModuleList(Block() for _ in range(3)), []

    def pack(self, tensor):
        self.kept.append(tensor.sum().item())
        return tensor.bfloat16()

    def forward(self, x):
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.float()):
            return self.blocks[2](x)


def train():
    """All that it computes: losses, weights, and what its own hooks were asked to keep."""
    torch.manual_seed(0)
    model = Model()
    optimizers = [torch.optim.Adam(block.parameters()) for block in model.blocks]
    losses = []
    for (x,) in DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=2):
        loss = model(x.requires_grad_()).square().mean()
        loss.backward()
        losses.append((loss.item(), x.grad.sum().item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [parameter.tolist() for parameter in model.parameters()], model.kept


@pytest.fixture(scope="module")
def plain():
    return train()


def plant(monkeypatch, place, name, at):
    owner = importlib.import_module(f"memadvisor.capture.{place}")
    *inside, name = name.split(".")
    for each in inside:
        owner = getattr(owner, each)
    original, num_calls = getattr(owner, name), 0

    def failing(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise Planted("here")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.fixture
def late(monkeypatch):
    """What ends later than where the profiler was stopped, and so where its event no longer is."""
    original, found = torch.autograd._disable_profiler, []

    def disable():
        now_ns = time.time_ns()
        result = original()
        pending = list(result.experimental_event_tree())
        while pending:
            node = pending.pop()
            found.extend([node.name] if node.end_time_ns > now_ns else [])
            pending += node.children
        return result

    monkeypatch.setattr(truth.autograd, "_disable_profiler", disable)
    return found


@pytest.mark.parametrize(("place", "name", "at"), _PLACES)
def test_the_training_is_as_it_was(tmp_path, monkeypatch, capfd, plain, late, place, name, at):
    with monkeypatch.context() as context:
        context.setattr("memadvisor.api.measure_engines", tuple)
        if name in ("learn", "arithmetic_of"):
            context.setattr("memadvisor.capture.labels.kinds", {})
        plant(context, place, name, at)
        with memadvisor.profile(tmp_path / "run", trace_step=1):
            result = train()

    assert result == plain
    assert capfd.readouterr().err.splitlines() == ["memadvisor stopped recording: Planted: here"]
    assert not torch.nn.modules.module._has_any_global_hook()
    assert not torch._C._autograd._profiler_enabled() and late == []
    assert _get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_recorder_that_has_ended_is_told_of_no_backward_where_another_has_wrapped_its_wrapper(
    tmp_path, monkeypatch
):
    outer, inner = memadvisor.profile(tmp_path / "outer"), memadvisor.profile(tmp_path / "inner")
    outer.__enter__()
    inner.__enter__()
    train()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    told = []
    for name in ("enter_backward", "leave_backward", "see_failure"):
        monkeypatch.setattr(Recorder, name, lambda *args, name=name: told.append(name))
    train()

    assert told == []


@pytest.mark.parametrize(("is_around_second", "said"), [(True, "what is kept"), (False, "what that keeps")])
def test_hooks_that_end_before_the_optimizer_steps_are_said_to_be_asked(tmp_path, is_around_second, said):
    """As of `save_on_cpu`, around the forward or a part of it: what is kept was not recorded, and nobody knew why."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    on_cpu = torch.autograd.graph.save_on_cpu
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            with on_cpu():
                x = checkpoint(first, torch.randn(4, 8, requires_grad=True), use_reentrant=False)
            with on_cpu() if is_around_second else torch.enable_grad():
                second(x).square().mean().backward()
            optimizer.step()
    (note,) = prof.run.ranks[0].notes
    assert note.text.endswith(f"{said} for the backward is not recorded.")


def test_a_checkpoint_that_the_script_has_around_a_block_is_recorded_and_no_hooks_of_its_own(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            checkpoint(model, torch.randn(4, 8), use_reentrant=False).square().mean().backward()
            optimizer.step()
    assert not prof.run.ranks[0].notes


@pytest.mark.parametrize("is_around_all", [True, False])
def test_hooks_that_the_script_has_around_its_steps_are_asked(tmp_path, plain, is_around_all):
    """They round what is kept: the training without them is another one."""

    def train_rounded():
        torch.manual_seed(0)
        model, num_kept = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def pack(tensor):
            num_kept.append(1)
            return tensor.bfloat16()

        def hooks(is_here):
            rounding = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.float())
            return rounding if is_here else torch.enable_grad()

        results = []
        with hooks(is_around_all):
            for _ in range(5):
                with hooks(not is_around_all):
                    loss = model(torch.randn(4, 8)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                model(torch.randn(4, 8))
                results.append((loss.item(), len(num_kept)))
        return results

    expected = train_rounded()
    with memadvisor.profile(tmp_path / "run") as prof:
        assert train_rounded() == expected
    rank = prof.run.ranks[0]
    assert rank.traced_step is not None
    assert ["what is kept for the backward is not recorded" in note.text for note in rank.notes] == [True]
