"""A plan's forwards under autocast, on scripts in float32: bit for bit what autocast written by hand gives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.engines.applied import Applied
from memadvisor.engines.script.casting import cast
from memadvisor.engines.script.live import model_fingerprint
from memadvisor.engines.single_process import SingleProcess
from memadvisor.plan import PlannedModel
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, applied, make_plan
from tests.torch_exit import completed
from tests.warm_python import warm_python

BF16 = make_plan(1, autocast="bf16")
WORDS = 13


def by_hand(model, device="cpu"):
    """A call of the model as accelerate prepares it."""

    def call(*args, **kwargs):
        with torch.autocast(device, torch.bfloat16):
            output = model(*args, **kwargs)
        return output.float()

    return call


def steps(model, optimizer, call, count=3, accumulate=2, rank=0):
    """Losses and accuracies of a script that knows nothing of autocast, with an evaluation in between."""
    torch.manual_seed(5)
    data, found = torch.Generator().manual_seed(rank), []
    for _ in range(count):
        for _ in range(accumulate):
            words = torch.randint(WORDS, (4, 7), generator=data)
            scores = call(words[:, :-1])
            assert scores.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
            loss = F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()) / accumulate
            loss.backward()
            found.append(float(loss.detach()))
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(float(call(words).sum()))
        model.train()
    return found


def new(**how):
    torch.manual_seed(3)
    model = Model(**{"batch_norm": True, "dropout": 0.1, **how})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(plan, **how):
    model, optimizer = new(**how)
    notes: list[str] = []
    with applied(plan, note=lambda level, text: notes.append(text)):
        losses = steps(model, optimizer, model)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    return losses, copy.deepcopy(model.state_dict()), [text for text in notes if "plan's autocast" in text]


def trained_by_hand(**how):
    model, optimizer = new(**how)
    return steps(model, optimizer, by_hand(model)), copy.deepcopy(model.state_dict()), []


def are_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("how", [{}, {"tied": True}, {"checkpointed": True}], ids=str)
@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"policy": "every-layer"},
        {"policy": "sqrt"},
        {"policy": "selective"},
        {"activation_tier": "disk"},
        {"optimizer_tier": "disk"},
        {"fused_updates": True},
        {"chunked_loss": ChunkedLoss(rows=5)},
        {"optimizer_bits": 8},
        {"activation_bits": 8},
        {"optimizer_tier": "disk", "delayed_update": True},
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_autocast_by_hand(beside, how):
    exact = beside.keys() <= {"policy", "activation_tier", "optimizer_tier"}
    with contextlib.nullcontext() if exact else applied(make_plan(1, **beside)):
        theirs = trained_by_hand(**how)
    are_equal(trained(make_plan(1, autocast="bf16", **beside), **how), theirs)


def ranks_train(rank, zero, policy):
    found = []
    for is_ours in (True, False):
        torch.manual_seed(3)
        model = Model(batch_norm=True, dropout=0.1)
        plan = make_plan(2, zero, policy, autocast="bf16" if is_ours else None, overlap=True)
        with applied(plan):
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
            found.append(steps(ddp, optimizer, ddp if is_ours else by_hand(ddp), rank=rank))
    return found


@pytest.mark.parametrize("policy", ["none", "every-layer"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_train_as_with_autocast_by_hand(zero, policy):
    for ours, theirs in run_ranks(ranks_train, 2, zero, policy):
        assert ours == theirs


def ranks_of_a_script_of_one(rank):
    """Losses of a script that knows nothing of ranks, with autocast by a plan and by hand."""
    found = []
    for autocast in ("bf16", None):
        torch.manual_seed(0)
        model = Perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(12, 4), torch.randn(12, 2))
        single = SingleProcess(2, lambda level, text: None)
        single._has_started = True  # the pool's group stands for its own
        engine = Applied(make_plan(2, 1, autocast=autocast), None, None)
        call, losses = model if autocast else by_hand(model), []
        try:
            for _ in range(2):
                for inputs, wanted in DataLoader(data, batch_size=3):
                    loss = F.mse_loss(call(inputs), wanted)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
        finally:
            engine.remove()
            single.remove()
        found.append(losses)
    return found


def test_a_script_that_knows_nothing_of_ranks_has_it_from_its_first_call_on():
    for ours, theirs in run_ranks(ranks_of_a_script_of_one, 2):
        assert ours == theirs and len(ours) == 4


@pytest.mark.timeout(300)
def test_the_sample_prints_what_it_prints_with_autocast_of_its_own(tmp_path):
    script = Path(__file__).parents[2] / "samples" / "train_gpt.py"
    words = (
        script,
        *[
            "--layers",
            "2",
            "--dim",
            "32",
            "--heads",
            "2",
            "--seq",
            "32",
            "--micro-batch",
            "2",
            "--accum",
            "2",
            "--steps",
            "4",
        ],
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ours, theirs, plain = (
        completed([warm_python(), *map(str, command)], timeout=150, env=environment)
        for command in (
            ("-m", "memadvisor", "run", "--autocast", "bf16", "--out", tmp_path / "run", *words),
            (*words, "--bf16"),
            words,
        )
    )
    assert ours.returncode == 0 and ours.stdout == theirs.stdout != plain.stdout
    assert "This plan is lossy: forwards of the model run under torch.autocast" in ours.stderr


# ---- models of other kinds -----------------------------------------------------------------------


class Recurrent(nn.Module):
    """What it returns is an object of its own class, as Hugging Face's models return."""

    @dataclass
    class Output:
        loss: torch.Tensor | None
        states: tuple[torch.Tensor, ...]

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        states, (last, _) = self.lstm(x)
        return self.Output(self.head(last).square().mean(), (states, last))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3), nn.Flatten()
        )

    def forward(self, x):
        return {"maps": [self.layers(x)]}


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


KINDS = {
    "mlp": (Perceptron, (3, 4), lambda output: output.square().sum()),
    "cnn": (Convolutional, (3, 2, 8, 8), lambda output: output["maps"][0].square().mean()),
    "lstm": (Recurrent, (3, 7, 5), lambda output: output.loss + output.states[0].mean()),
}


def trained_kind(kind, plan=None):
    build, shape, loss_of = KINDS[kind]
    torch.manual_seed(0)
    model, found = build(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with applied(plan) if plan is not None else contextlib.nullcontext():
        for _ in range(4):
            if plan is None:
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(torch.randn(shape))
                output = cast(output, torch.float32, lambda tensor: tensor.dtype is torch.bfloat16)
            else:
                output = model(torch.randn(shape))
            loss = loss_of(output)
            assert loss.dtype is torch.float32
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found, copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("beside", [{}, {"policy": "every-layer"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind_train_as_with_autocast_by_hand(kind, beside):
    are_equal(trained_kind(kind, make_plan(1, autocast="bf16", **beside)), trained_kind(kind))


def adversaries(call=lambda model: model, plan=None):
    torch.manual_seed(0)
    models = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    found, notes = [], []
    if plan is not None:
        names = ("", "model1") if plan.policy == "chosen" else ()
        planned = (
            PlannedModel(name=name, fingerprint=model_fingerprint(model), is_trainable=True)
            for name, model in zip(names, models, strict=False)
        )
        plan = dataclasses.replace(plan, models=tuple(planned))
    with applied(plan, note=lambda level, text: notes.append(text)) if plan else contextlib.nullcontext():
        generator, judge = (call(model) for model in models)
        for _ in range(3):
            made, real = generator(torch.randn(4, 3)), torch.randn(4, 4)
            loss = (judge(real) - judge(made.detach())).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            found.append(loss.item())
            loss = judge(made).mean()
            loss.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            found.append(loss.item())
    return found, [text for text in notes if "plan's autocast" in text]


def test_all_models_of_the_plan_are_under_autocast():
    ours, notes = adversaries(plan=make_plan(1, 0, "chosen", autocast="bf16"))
    assert ours == adversaries(by_hand)[0] != adversaries()[0]
    assert not notes


def test_a_model_that_a_plan_made_by_hand_is_not_for_is_told_of():
    _, notes = adversaries(plan=BF16)
    assert notes == ["of the plan's autocast: Sequential is none of the plan's models, and computes as it is"]


# ---- compiled models -----------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x).tanh()


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def compiled_training(where, plan=None, by_hand=lambda model: model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, found = Compiled(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with applied(plan) if plan else contextlib.nullcontext():
        call = model
        if where == "blocks":
            model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
        elif where == "blocks by method":
            for block in model.blocks:
                block.compile(backend="eager")
        else:
            call = torch.compile(model, backend="eager", fullgraph=True)
        call = by_hand(call)
        for _ in range(5):
            loss = call(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            with torch.no_grad():
                call(torch.randn(4, 6))
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("where", ["around", "blocks", "blocks by method"])
def test_compiled_models_train_on_as_many_graphs_as_with_autocast_by_hand(where):
    ours, ours_graphs = compiled_training(where, BF16)
    theirs, graphs = compiled_training(where, make_plan(1, fused_updates=True), by_hand)
    assert ours == theirs and ours_graphs == graphs > 0
    assert ours != compiled_training(where)[0]


def test_what_is_compiled_is_a_modules_forward_and_not_our_call_around_it():
    """Else all compiled modules would share one limit of recompilations."""
    torch._dynamo.reset()
    model = Compiled()
    model.blocks = nn.ModuleList(torch.compile(Compiled(), backend="eager") for _ in range(2))
    with applied(BF16):
        model(torch.randn(4, 6)).sum().backward()
        of_call, of_forward = (
            torch._dynamo.eval_frame._debug_get_cache_entry_list(each.__code__)
            for each in (nn.Module.__call__, Compiled.forward)
        )
    assert of_forward and not of_call
