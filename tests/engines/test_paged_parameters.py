"""Parameters and gradients on disk, on one rank: the same training in every bit, in less memory."""

from __future__ import annotations

import copy
import errno
import io
import os
from fnmatch import fnmatch
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.engines.apply import apply
from memadvisor.engines.lanes.disk import DiskFile
from memadvisor.engines.lanes.tiers import DiskTier, HostTier, PinnedMemory, StagedDiskTier
from memadvisor.engines.script.live import read_model
from memadvisor.engines.sharding import one_process
from memadvisor.engines.sharding.gathers import Gathers
from memadvisor.engines.sharding.paged_flats import PagedTensor
from memadvisor.engines.sharding.released import ReleasedParameter
from memadvisor.engines.updates import state_offload
from memadvisor.errors import PlanError
from memadvisor.plan import Plan, UnitPlan
from tests.engines.trainings import Model, make_optimizer, make_plan
from tests.engines.updates.test_state_offload import Fault, assert_same, train
from tests.engines.virtual_lane import OrderError, World

ON_DISK = make_plan(1, 3, optimizer_tier="disk", parameter_tier="disk", overlap=True, gather_depth=1)


class Large(Model):
    """The model itself has more parameters than any of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0.9, 1.1, 2000))

    def forward(self, words):
        return super().forward(words) * self.table.mean()


def some_on_disk(model: nn.Module, pattern: str, **changes) -> Plan:
    """Only what matches lies elsewhere; the first block runs again."""
    units = tuple(
        UnitPlan(
            name=unit.name,
            zero_stage=3,
            recompute=unit.name == "blocks.0",
            reshard=unit.name != "blocks.1",
            **dict.fromkeys(
                ("optimizer_tier", "parameter_tier"), "disk" if fnmatch(unit.name, pattern) else "device"
            ),
        )
        for unit in read_model(model).units
    )
    return make_plan(1, 3, "chosen", units, **changes)


@pytest.mark.parametrize(
    ("kind", "model", "plan"),
    [
        ("adamw", {"tied": True, "batch_norm": True, "dropout": 0.1}, ON_DISK),
        ("groups", {"unused": True, "checkpointed": True}, ON_DISK),
        ("sgd", {"tied": True, "smooth": True}, "[!n]*"),
        ("Adagrad", {"dropout": 0.1}, "blocks.*"),
    ],
)
def test_training_is_the_same_in_every_bit(kind, model, plan):
    """Tied, unused and frozen parameters, running statistics, the script's own checkpoints, clipping, accumulation."""

    def make():
        torch.manual_seed(3)
        made = Model(**model)
        made.blocks[1].norm.requires_grad_(False)
        return made

    plain = train(kind, accumulate=2, model=make())
    plan = plan if isinstance(plan, Plan) else some_on_disk(make(), plan, gather_depth=2)
    assert_same(train(kind, plan, accumulate=2, model=make()), plain)


class Biased(nn.Module):
    """Each block hands on the bias that the first has made, as those of T5 do with a position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(_Handing(makes_bias=number == 0) for number in range(4))

    def forward(self, words):
        x, bias = self.tokens(words), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x @ self.tokens.weight.T


class _Handing(nn.Module):
    def __init__(self, makes_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.bias = nn.Embedding(5, 8) if makes_bias else None

    def forward(self, x, bias):
        bias = bias if self.bias is None else self.bias(torch.arange(5))
        return x + torch.tanh(self.linear(x) + bias), bias


def test_what_a_unit_hands_on_brings_its_parameters_back_no_second_time(monkeypatch):
    """The bias's gradient is there when all blocks but the first are done with their backward."""
    gathered: list[str] = []
    make_room = Gathers._make_room
    monkeypatch.setattr(
        Gathers,
        "_make_room",
        lambda self, flat, full: (gathered.append(flat.unit), make_room(self, flat, full)),
    )
    after = []

    def look(model, optimizer, step):
        after.append([gathered.count(f"blocks.{number}") for number in range(4)])
        gathered.clear()

    torch.manual_seed(3)
    model = Biased()
    assert_same(
        train("adamw", ON_DISK, model=copy.deepcopy(model), each_step=look), train("adamw", model=model)
    )
    assert after[1:] == [[2, 2, 2, 2]] * 5  # for the forward, and for the backward


def test_no_buffer_outlives_the_update(monkeypatch):
    """Also where three units take turns in one buffer, and none between them has parameters in the other."""
    flats = {}
    make_room = Gathers._make_room
    monkeypatch.setattr(
        Gathers,
        "_make_room",
        lambda self, flat, full: (flats.setdefault(flat.index, flat), make_room(self, flat, full)),
    )
    units = tuple(
        UnitPlan(
            name=unit.name,
            zero_stage=3,
            recompute=False,
            optimizer_tier="disk",
            parameter_tier="disk" if unit.name in ("", "tokens", "head") else "device",
        )
        for unit in read_model(Model()).units
    )
    held = []

    def look(model, optimizer, step):
        held.append([what for flat in flats.values() for _, what in flat.page.tensors()])

    train("adamw", make_plan(1, 3, "chosen", units), model=Model(), each_step=look)
    assert len(flats) > 2
    assert held == [[]] * 6


class _Adapted(nn.Module):
    """As a layer with an adapter, which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x, is_adapted):
        return torch.tanh(self.base(x)) + (self.adapter(x) if is_adapted else 0)


class Adapted(nn.Module):
    """The gradients of a block have come when its second call's backward is over, and its first call's needs frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(_Adapted() for _ in range(3))

    def forward(self, words):
        x = self.tokens(words)
        for is_adapted in (False, True):
            for block in self.blocks:
                x = block(x, is_adapted)
        return x @ self.tokens.weight.T


def test_frozen_weights_are_there_for_a_call_whose_backward_comes_after_the_units_last_gradient():
    torch.manual_seed(3)
    model = Adapted()
    assert_same(train("adamw", ON_DISK, model=copy.deepcopy(model)), train("adamw", model=model))


def test_whatever_reads_parameters_and_gradients_gets_them():
    """Evaluation, state dicts saved and loaded, writes in place, gradients zeroed in place, clipped by value or read."""
    seen = {}

    def look(model, optimizer, step):
        words = torch.arange(12).view(3, 4)
        model.eval()
        with torch.no_grad():
            seen[step, "evaluated"] = model(words).clone()
            model.blocks[step % 3].up.weight.mul_(0.9)
        model.train()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        seen[step, "saved"] = torch.load(file)
        model.load_state_dict({name: value * 0.99 for name, value in seen[step, "saved"].items()})
        F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        seen[step, "gradient"] = model.head.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        seen[step, "copied"] = copy.deepcopy(model).head.weight.detach()

    ours = train("adamw", ON_DISK, each_step=look)
    found = dict(seen)
    assert_same(ours, train("adamw", each_step=look))
    torch.testing.assert_close(found, seen, rtol=0, atol=0)


def test_removing_it_leaves_the_training_as_it_was():
    def trained(plan):
        torch.manual_seed(3)
        model = Model(tied=True)
        optimizer = make_optimizer("adamw", model)
        found = None if plan is None else apply(plan, model, optimizer)
        words = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(0))
        for step in range(6):
            model(words).square().mean().backward()
            if step == 3 and found is not None:
                assert type(model.tokens.weight) is ReleasedParameter
                found.remove()
            optimizer.step()
            optimizer.zero_grad()
        assert type(model.tokens.weight) is nn.Parameter
        return [], model.state_dict(), optimizer.state_dict()

    assert_same(trained(ON_DISK), trained(None))


@pytest.mark.parametrize("after", [1, 15, 60])
def test_a_full_disk_leaves_all_in_memory(monkeypatch, after):
    """When parameters are put away first, in the first update, and later."""
    plain = train("adamw", steps=3)
    monkeypatch.setattr("os.pwrite", Fault(errno.ENOSPC, os.pwrite, after))
    notes = []
    ours = train("adamw", ON_DISK, steps=3, note=lambda level, text: notes.append((level, text)))
    assert_same(ours, plain)
    found = [level for level, text in notes if "parameters and gradients cannot be written" in text]
    assert found == ["warning"]


@pytest.mark.filterwarnings("ignore:global module forward hook")
def test_parameters_that_cannot_be_read_back_end_the_training(monkeypatch):
    def break_disk(model, optimizer, step):
        if step == 2:
            monkeypatch.setattr("os.preadv", Fault(errno.EIO))

    with pytest.raises(RuntimeError, match=r"parameters of .* cannot be read back from disk: Input/output"):
        train("adamw", ON_DISK, each_step=break_disk)


def test_what_cannot_be_done_is_refused_before_the_first_step():
    with pytest.raises(PlanError, match="Adafactor needs whole parameters"):
        train("Adafactor", ON_DISK)
    with pytest.raises(PlanError, match="host's memory already"):
        train("adamw", make_plan(1, 3, optimizer_tier="host", parameter_tier="host"))
    with pytest.raises(PlanError, match="is for 2 ranks"):
        train("adamw", make_plan(2, 3, optimizer_tier="disk", parameter_tier="disk"))
    with pytest.raises(PlanError, match="not of ZeRO stage 3"):
        train("adamw", make_plan(1, 2, optimizer_tier="disk", parameter_tier="disk"))
    with pytest.raises(PlanError, match="optimizer state elsewhere"):
        train("adamw", make_plan(1, 3, parameter_tier="disk"))


@pytest.mark.parametrize("make", [partial(Model, tied=True, batch_norm=True), Large], ids=["tied", "large"])
@pytest.mark.parametrize("tier", ["disk", "host", "staged disk"])
def test_nothing_is_read_or_written_too_soon(tier, make, tmp_path, monkeypatch):
    """Transfers as late as they may be, or at any moment; of a GPU's tiers, their logic."""

    def new_model():
        torch.manual_seed(3)
        return make()

    plain = train("adamw", steps=2, model=new_model())

    def play(seed, eagerness):
        world = World(seed, eagerness)
        host = HostTier(world.lane("out"), world.lane("back"), PinnedMemory(lambda level, text: None))
        file = DiskFile(tmp_path, writes=world.lane("write"), reads=world.lane("read"))
        made = {"disk": DiskTier(file), "host": host, "staged disk": StagedDiskTier(file, host)}
        for module in (one_process, state_offload):
            monkeypatch.setattr(module, "make_tier", lambda *_: made[tier])
        with world.watched():
            assert_same(train("adamw", ON_DISK, steps=2, model=new_model()), plain)
        return world

    assert play(0, 0.0).num_late > 10 and play(1, 0.3).num_early > 10
    if tier == "disk":

        def hasty(paged):
            paged.write = paged.memory = None

        monkeypatch.setattr(PagedTensor, "settle", hasty)
        with pytest.raises((OrderError, AssertionError, RuntimeError)):
            play(0, 0.0)
