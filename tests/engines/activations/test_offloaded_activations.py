"""Units whose saved tensors wait on disk train bitwise as without a plan, and keep nothing in memory meanwhile."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from memadvisor.engines.activations import offloaded_activations, saved_activations
from memadvisor.engines.lanes import tiers as tiers_module
from memadvisor.engines.lanes.disk import DiskFile
from memadvisor.engines.lanes.tiers import DiskTier, HostTier, PinnedMemory
from memadvisor.errors import PlanError
from memadvisor.plan import UnitPlan
from tests.engines.trainings import Model, applied, make_plan
from tests.engines.virtual_lane import OrderError, World

KEPT = ("aten::addmm", "aten::mm", "aten::native_layer_norm", "aten::native_batch_norm", "aten::empty_like")
UNITS = ("tokens", "blocks.0", "blocks.1", "blocks.2", "norms.0", "norms.1", "head")


@pytest.fixture(autouse=True)
def no_tensor_is_too_small(monkeypatch):
    monkeypatch.setattr(saved_activations, "MIN_BYTES", 1)


@dataclass(frozen=True)
class Training:
    """A training of a small model, and what its loop does that an engine might not expect."""

    options: tuple[tuple[str, object], ...] = ()
    bf16: bool = False
    num_alive: int = 1  # micro-batches whose graphs are alive at once
    retains: bool = False  # the graph, for a second backward
    penalises: bool = False  # the gradient, by a double backward
    fails_at: int | None = None
    evaluates: bool = False
    drops_graph: bool = False

    def run(self, steps=2):
        torch.manual_seed(1)
        model = Model(**dict(self.options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(2)
        found = []
        for step in range(steps):
            losses = [self.loss(model, step) for _ in range(self.num_alive)]
            for loss in losses:
                if self.penalises:
                    (gradient,) = torch.autograd.grad(loss, model.scale, create_graph=True)
                    loss = loss + gradient.square()
                loss.backward(retain_graph=self.retains)
                if self.retains:
                    loss.backward()
            found += [float(loss.detach()) for loss in losses]
            optimizer.step()
            optimizer.zero_grad()
        return found, {name: value.clone() for name, value in model.state_dict().items()}

    def loss(self, model, step):
        words = torch.randint(0, 13, (4, 6))
        if self.drops_graph:
            model(words)
        if self.evaluates:
            with torch.no_grad():
                model(words)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            if step == self.fails_at:
                with pytest.raises(IndexError):
                    model(words + 13)
            return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


TRAININGS = st.builds(
    Training,
    options=st.fixed_dictionaries(
        {
            "dropout": st.sampled_from([0.0, 0.3]),
            "batch_norm": st.booleans(),
            "tied": st.booleans(),
            "checkpointed": st.booleans(),
        }
    ).map(lambda options: tuple(options.items())),
    bf16=st.booleans(),
    num_alive=st.integers(1, 3),
    retains=st.booleans(),
    fails_at=st.sampled_from([None, 1]),
    evaluates=st.booleans(),
    drops_graph=st.booleans(),
)


def assert_equal(ours, plain):
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])


def by_name(names, recomputed=(), tier="disk", kept=(), **changes):
    """A plan for these units of tests' Model, and those around them as they are."""
    units = tuple(
        UnitPlan(name=name, zero_stage=0, recompute=again, activation_tier=tier, kept=tuple(kept) * again)
        for name, again in ((name, name in recomputed) for name in names)
    )
    return make_plan(1, units=units, policy="chosen", **changes)


def tier_of(plan):
    """The one tier of an applied plan."""
    (tier,) = plan._activations._tiers.values()
    return tier


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    training=TRAININGS,
    away=st.sets(st.sampled_from(UNITS), min_size=1),
    again=st.sets(st.sampled_from(UNITS)),
    kept=st.sets(st.sampled_from(KEPT)),
)
def test_losses_and_weights_are_bitwise_equal(training, away, again, kept):
    """Any units on disk, also recomputed ones with outputs that they keep; graphs alive at once, kept for a second
    backward, dropped, broken off."""
    if not dict(training.options)["batch_norm"]:
        away = away - {"norms.0", "norms.1"}
    if dict(training.options)["tied"]:
        away = away - {"head"}  # it has no parameter of its own, and is no unit
    plain = training.run()
    notes = []
    plan = by_name(sorted(away), recomputed=again & away, kept=kept) if away else make_plan(1)
    with applied(plan, note=lambda level, text: notes.append(text)) as found:
        assert_equal(training.run(), plain)
        gc.collect()
        if away:
            goes = away - {"tokens"}
            assert tier_of(found)._file.size_bytes > 0 or not goes or dict(training.options)["checkpointed"]
            assert tier_of(found)._file.used_bytes == 0  # all room has been given back
    assert notes == []
    assert_equal(training.run(), plain)


def test_a_double_backward_finds_what_it_needs():
    training = Training(penalises=True, options=(("smooth", True),))
    plain = training.run()
    with applied(by_name(["blocks.0", "blocks.2", "head"])):
        assert_equal(training.run(), plain)


class Wide(nn.Module):
    """A block that keeps three times its output, and nothing else of size."""

    def __init__(self, dim=64):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def stack(count=4):
    torch.manual_seed(3)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 64)), *[Wide() for _ in range(count)], nn.Linear(64, 1)]
    )


def kept_here(found):
    """Bytes of what autograd keeps of offloaded units that are in memory."""
    (plays,) = found._activations._plays
    return sum(kept.size_bytes for kept in plays.kept._kept.values() if not kept.is_away)


def test_after_a_forward_nothing_is_in_memory_and_in_the_backward_two_units_are():
    with applied(make_plan(1, activation_tier="disk")) as found:
        model = stack()
        seen = []
        for block in model[1:-1]:
            block.up.weight.register_hook(lambda gradient: seen.append(kept_here(found)))
        output = model(torch.ones(32, 8))
        output_bytes = 32 * 64 * 4
        assert kept_here(found) == 0  # the last block's has left under the last layer
        output.sum().backward()
    # Of its three (x and both sides of the tanh) a block has two left, or fewer; the next one's are on their way.
    assert all(bytes_here <= (2 + 3) * output_bytes + output_bytes for bytes_here in seen) and len(seen) == 4
    assert max(seen) >= 3 * output_bytes


def test_what_others_keep_anyway_does_not_go():
    """Parameters, what needs no gradient, and tensors that are small."""
    sent = []
    with applied(by_name(["0"])) as found:
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
        write = DiskTier.write
        DiskTier.write = lambda tier, block, source: (sent.append(source.nbytes), write(tier, block, source))[
            1
        ]
        try:
            model(torch.ones(32, 8)).sum().backward()
        finally:
            DiskTier.write = write
        assert sent == [] and tier_of(found)._file.size_bytes == 0


def test_small_tensors_stay(monkeypatch):
    monkeypatch.setattr(saved_activations, "MIN_BYTES", 64 * 2**10)
    with applied(make_plan(1, activation_tier="disk")) as found:
        Training().run(1)
        assert tier_of(found)._file.size_bytes == 0


class Writes(nn.Module):
    """Its forward changes a tensor in place that autograd has saved."""

    def __init__(self, when):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.when = when

    def forward(self, x):
        y = self.linear(x)
        self.saved = y.sin()
        z = self.saved.exp()  # keeps its result
        if self.when == "inside":
            z.add_(1)
        self.z = z
        return z * 2 if self.when == "inside" else z + 0


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("min_bytes", [1, 2**30])
def test_a_saved_tensor_that_is_modified_in_place_is_found_out(when, min_bytes, monkeypatch):
    monkeypatch.setattr(saved_activations, "MIN_BYTES", min_bytes)
    for plan in (make_plan(1), by_name(["0"])):
        with applied(plan):
            model = nn.Sequential(Writes(when), nn.Linear(64, 1))
            loss = model(torch.randn(8, 64)).sum()
            if when == "after":
                with torch.no_grad():
                    model[0].z.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_a_graph_that_nobody_runs_backward_gives_its_room_back():
    with applied(make_plan(1, activation_tier="disk")) as found:
        model = stack()
        for _ in range(3):
            output = model(torch.ones(32, 8))
            assert tier_of(found)._file.used_bytes > 0
            del output
            assert tier_of(found)._file.used_bytes == 0  # at once: no cycle keeps the graph
        most = tier_of(found)._file.size_bytes
        model(torch.ones(32, 8)).sum().backward()
        assert tier_of(found)._file.size_bytes == most


def test_a_script_in_another_order_than_the_plan_is_right_and_told_once():
    """The units run backwards, so that each is asked for before the schedule has brought it back."""

    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.blocks = nn.ModuleList(Wide() for _ in range(4))

        def forward(self, x):
            for block in reversed(self.blocks):
                x = block(x)
            return x

    def run():
        model = Reversed()
        model(torch.ones(4, 64)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, notes = run(), []
    # A unit's backward announces itself by its output; one whose output is inside an object does not.
    with applied(make_plan(1, activation_tier="disk"), note=lambda level, text: notes.append(text)) as found:
        found._activations._backward_begins = lambda call: None
        assert all(map(torch.equal, run(), plain))
    assert len([note for note in notes if "not ahead" in note]) == 1


def failing(when, number):
    """A pwrite or preadv that finds the disk full, or broken, from its `number`th call on."""
    calls = iter(range(10**9))
    original = getattr(os, when)

    def call(*arguments):
        if next(calls) >= number:
            raise OSError(errno.ENOSPC if when == "pwrite" else errno.EIO, os.strerror(errno.ENOSPC))
        return original(*arguments)

    return call


@pytest.mark.parametrize("number", [0, 3])
def test_a_full_disk_keeps_everything_in_memory_and_says_so_once(number, monkeypatch):
    training, notes = Training(options=(("dropout", 0.2),), num_alive=2), []
    plain = training.run()
    with applied(make_plan(1, activation_tier="disk"), note=lambda level, text: notes.append((level, text))):
        monkeypatch.setattr(os, "pwrite", failing("pwrite", number))
        assert_equal(training.run(), plain)
    assert [level for level, _ in notes] == ["warning"] and "No space left" in notes[0][1]


def test_what_cannot_be_read_back_ends_the_backward(monkeypatch):
    with applied(make_plan(1, activation_tier="disk")):
        output = stack()(torch.ones(32, 8))
        monkeypatch.setattr(os, "preadv", failing("preadv", 0))
        with pytest.raises(RuntimeError, match="could not be read back"):
            output.sum().backward()


def test_on_a_cpu_the_host_is_no_other_memory():
    with applied(make_plan(1, activation_tier="host")), pytest.raises(PlanError, match="the same memory"):
        Training().run(1)


def test_a_directory_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    plan = make_plan(1, activation_tier="disk", disk_directory=str(tmp_path / "none"))
    with applied(plan), pytest.raises(Exception, match="No file can be made"):
        Training().run(1)


def test_a_name_that_is_no_units_is_refused():
    plan = make_plan(1, activation_tier="disk", activation_units=("blocks.7",))
    with applied(plan), pytest.raises(PlanError, match=r"no unit 'blocks.7'"):
        Training().run(1)


def test_units_are_named_by_patterns():
    with applied(make_plan(1, activation_tier="disk", activation_units=("norms.*", "head"))) as found:
        model = Model(batch_norm=True)
        model(torch.zeros(4, 6, dtype=torch.long))
        moved = [found._activations._units[module][0] for module in found._activations._moved]
        assert sorted(moved) == ["head", "norms.0", "norms.1"]


def test_what_a_script_checkpoints_itself_is_left_to_it():
    class Script(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Wide() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    with applied(make_plan(1, activation_tier="disk")) as found:
        Script()(torch.ones(4, 64)).sum().backward()
        assert tier_of(found)._file.size_bytes == 0


@pytest.mark.parametrize("tier", ["disk", "host", "staged disk"])
def test_transfers_wait_for_compute_and_compute_for_transfers(tier, monkeypatch, tmp_path):
    """On lanes that do their work as late as they may, or at random; a wait that is left out is found."""
    training = Training(options=(("batch_norm", True), ("dropout", 0.2)), num_alive=2)
    plain = training.run()

    def play(seed, eagerness):
        world = World(seed, eagerness)
        outwards, back = world.lane("out"), world.lane("back")
        host = HostTier(outwards, back, PinnedMemory(lambda level, text: None))
        file = DiskFile(tmp_path, writes=world.lane("write"), reads=world.lane("read"))
        made = {"disk": DiskTier(file), "host": host, "staged disk": tiers_module.StagedDiskTier(file, host)}
        monkeypatch.setattr(offloaded_activations, "make_tier", lambda *_: made[tier])
        with applied(by_name(UNITS, recomputed=UNITS[1:3], kept=KEPT)), world.watched():
            assert_equal(training.run(), plain)
        return world

    # Its record of every access keeps all storages alive; a transfer may not rely on that.
    monkeypatch.setattr(saved_activations.Kept, "held_elsewhere", lambda kept: None)
    worlds = [play(seed, (0.0, 0.3)[seed]) for seed in range(2)]
    assert sum(world.num_early for world in worlds) > 10 and sum(world.num_late for world in worlds) > 10
    here = saved_activations.Kept.here

    def hasty(kept):
        if kept._arriving is not None:
            kept.storage, kept._arriving = kept._arriving[0], None
        return here(kept)

    monkeypatch.setattr(saved_activations.Kept, "here", hasty)
    with pytest.raises(
        (OrderError, AssertionError)
    ):  # what has not come is NaN, where nothing reads it too soon
        play(0, 0.0)
