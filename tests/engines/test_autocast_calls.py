"""Which calls of a script's modules a plan has under autocast, and which not."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.test_autocast_trainings import BF16, Perceptron, are_equal, by_hand, new
from tests.engines.trainings import Model, applied, make_plan

# ---- when it is on, and when not -----------------------------------------------------------------


@pytest.fixture
def met():
    """A model that a plan with autocast is in force for, and notes."""
    model, _ = new(batch_norm=False, dropout=0.0)
    notes: list[str] = []
    with applied(BF16, note=lambda level, text: notes.append(text)) as engine:
        model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        model.zero_grad()
        del notes[:]
        yield model, notes, engine


def is_off():
    return not torch.is_autocast_enabled("cpu")


def test_a_part_that_the_script_calls_itself_is_under_autocast_and_returns_float32(met):
    model, _, _ = met
    hidden = torch.randn(2, 9)
    made = model.head(hidden)
    assert made.dtype is torch.float32 and is_off()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model.head(hidden)
    assert torch.equal(made, theirs.float()) and theirs.dtype is torch.bfloat16
    assert not torch.equal(made, F.linear(hidden, model.head.weight))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_it_is_off_after_whatever_ends_a_call(met, error):
    model, _, _ = met

    def fails(*_):
        assert torch.is_autocast_enabled("cpu")
        raise error

    handle = model.blocks[1].register_forward_hook(fails)
    with pytest.raises(error):
        model(torch.zeros(2, 4, dtype=torch.long))
    assert is_off()
    handle.remove()
    assert model(torch.zeros(2, 4, dtype=torch.long)).dtype is torch.float32


def test_it_is_off_before_a_first_call_that_fails():
    model, _ = new()

    def fails(*_):
        raise KeyboardInterrupt

    model.blocks[0].register_forward_hook(fails)
    with applied(BF16):
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(2, 4, dtype=torch.long))
        assert is_off()


def test_an_autocast_of_the_scripts_own_stays_and_is_told_of_once(met):
    model, notes, _ = met
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            assert model(torch.zeros(2, 4, dtype=torch.long)).dtype is torch.float16
    assert notes == [
        "of the plan's autocast: the script calls Model under an autocast of its own, which stays"
    ]


def test_a_model_of_16_bits_is_left_as_it_is_and_told_of():
    model, optimizer = new(batch_norm=False)
    model.bfloat16()
    notes: list[str] = []
    with applied(BF16, note=lambda level, text: notes.append(text)):
        scores = model(torch.zeros(2, 4, dtype=torch.long))
        assert scores.dtype is torch.bfloat16
        scores.sum().backward()
        optimizer.step()
    assert "of the plan's autocast: no parameter of Model is float32: it computes as it is" in notes


def test_gradients_are_there_of_what_was_called_without_them_before():
    """In one call, too: a cast that was made without a graph is not used with one."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                x = self.layer(x)
            return self.layer(x)

    model = Twice()
    with applied(BF16):
        with torch.no_grad():
            model(torch.ones(2, 3))
        with torch.inference_mode():
            model(torch.ones(2, 3))
        model(torch.ones(2, 3)).sum().backward()
    assert float(model.layer.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_of_the_scripts_own_run_again_as_they_ran(is_reentrant):
    """A region without autocast inside of one that has it stays without in the second run."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.seen = []

        def inner(self, x):
            self.seen.append(torch.is_autocast_enabled("cpu"))
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                x = self.second(x.float())
            self.seen.append(x.dtype)
            return x

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=is_reentrant)

    def trained(plan):
        torch.manual_seed(0)
        model = Checkpointed()
        with applied(plan) if plan else contextlib.nullcontext():
            output = model(torch.ones(2, 4)) if plan else by_hand(model)(torch.ones(2, 4))
            output.square().sum().backward()
        return model.seen, [each.grad for each in model.parameters()]

    ours, theirs = trained(BF16), trained(None)
    assert ours[0] == theirs[0] and set(ours[0]) == {True, torch.float32}
    assert len(ours[0]) == (4 if is_reentrant else 3)  # the other one stops when it has all
    are_equal(ours[1], theirs[1])


def test_a_call_inside_the_backward_is_the_scripts_own_business(met):
    model, _, _ = met
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.no_grad():
                seen.append(torch.equal(model.head(hidden), F.linear(hidden, model.head.weight)))
            return gradient

    hidden = torch.randn(2, 9)
    Function.apply(model.head(hidden)).sum().backward()
    assert seen == [True]


def test_threads_have_it_each_for_itself(met):
    model, _, _ = met
    words = torch.zeros(2, 4, dtype=torch.long)
    found, inside = [], threading.Barrier(2)

    def waits(*_):
        inside.wait(10)
        assert torch.is_autocast_enabled("cpu")

    handle = model.blocks[1].register_forward_hook(waits)
    threads = [threading.Thread(target=lambda: found.append(model(words).detach())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert is_off()
    for thread in threads:
        thread.join()
    handle.remove()
    assert len(found) == 2 and found[0].dtype is torch.float32
    are_equal(found[0], found[1])


def test_nothing_of_it_is_on_the_model_and_nothing_stays(met):
    model, _, engine = met
    words = torch.zeros(2, 4, dtype=torch.long)
    assert list(inspect.signature(model.forward).parameters) == ["words", "use_extra"]
    assert "forward" not in vars(model) and type(model).forward is Model.forward
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(kept, weights_only=False)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(9, 9), nn.ReLU()))
    assert scripted(torch.ones(2, 9)).dtype is torch.float32
    under = model(words)
    plain = [each(words) for each in copies]
    engine.remove()
    again = model(words)
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    for each in plain:
        are_equal(each, again)
    assert not torch.equal(under, again)


def test_a_plan_that_is_removed_inside_a_call_leaves_autocast_off(met):
    model, _, engine = met
    handle = model.blocks[1].register_forward_hook(lambda *_: engine.remove())
    assert model(torch.zeros(2, 4, dtype=torch.long)).dtype is torch.float32
    assert is_off()
    handle.remove()


def test_arguments_may_have_any_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, *, module, call, original):
            return self.layer(module) + call + original

    with applied(BF16):
        assert Odd()(module=torch.ones(1, 2), call=1, original=2).dtype is torch.float32


def test_what_is_traced_has_no_casts_in_it(met):
    model, _, _ = met
    words = torch.zeros(2, 4, dtype=torch.long)
    traced = torch.jit.trace(model.eval(), words, check_trace=False)
    assert "bfloat16" not in str(traced.graph) and "aten::to" not in str(traced.inlined_graph)
    exported = torch.export.export(model, (words,), strict=False)
    assert not [node for node in exported.graph.nodes if "to" in str(node.target).split(".")]
    assert {node.meta["val"].dtype for node in exported.graph.nodes if "val" in node.meta} == {
        torch.float32,
        torch.int64,
    }


# ---- what it cannot be done with -----------------------------------------------------------------


def refused(model, *inputs):
    """The line that a training of the model is refused in, at its first update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with applied(BF16):
        with contextlib.suppress(PlanError):
            model(*inputs).sum().backward()
        with pytest.raises(PlanError) as found:
            optimizer.step()
    return found.value.one_line()


def test_a_model_that_the_script_shards_itself_is_refused():
    class FullyShardedDataParallel(nn.Sequential):
        """By its name, as torch's own is known."""

    assert "The script shards FullyShardedDataParallel itself" in refused(
        FullyShardedDataParallel(nn.Linear(2, 2)), torch.ones(1, 2)
    )


def test_a_stage_of_a_pipeline_is_refused(monkeypatch):
    monkeypatch.setattr("memadvisor.engines.autocast_calls.is_stage", lambda root: True)
    assert "Perceptron is a stage of a pipeline" in refused(Perceptron(), torch.ones(1, 4))


def test_replicas_in_threads_are_refused(monkeypatch):
    monkeypatch.setattr(nn.DataParallel, "forward", lambda self, x: self.module(x))
    model = nn.DataParallel(Perceptron())
    model.device_ids = [0, 1]
    assert "in torch.nn.DataParallel" in refused(model, torch.ones(1, 4))


def test_a_device_that_has_no_such_autocast_is_refused_in_torchs_words(monkeypatch):
    def autocast(device, dtype):
        raise RuntimeError("Current CUDA Device does not support bfloat16.\nmore")

    monkeypatch.setattr(torch, "autocast", autocast)
    line = refused(Perceptron(), torch.ones(1, 4))
    assert "no autocast to bfloat16 on the device of Perceptron: Current CUDA Device does not" in line


def test_a_call_that_is_captured_into_a_cuda_graph_is_refused(met, monkeypatch):
    model, _, _ = met
    monkeypatch.setattr("memadvisor.engines.autocast_calls.is_capturing", lambda: True)
    with pytest.raises(PlanError, match="captures into a CUDA graph"):
        model(torch.zeros(2, 4, dtype=torch.long))
    assert is_off()


def ranks_refuse(rank):
    """FSDP2, whose sharding a plan made by hand that recomputes alone leaves to the script."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with applied(make_plan(2, policy="every-layer", autocast="bf16")):
        model(torch.ones(1, 4)).sum().backward()
        try:
            optimizer.step()
        except PlanError as error:
            return error.one_line()


def test_a_script_with_fsdp2_is_refused():
    for line in run_ranks(ranks_refuse, 2):
        assert "itself, and autocast would keep copies of weights that it has freed" in line
