"""Units that are called several times before the backward: predicted from the plain run, applied, and measured."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.activations import Activations
from memadvisor.cost.moved_activations import units_away
from memadvisor.cost.simulate import simulate
from memadvisor.cost.stretches import Stretches
from memadvisor.cost.transfers import TransferTimes
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import UnitPlan
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import BATCH, DISK, LENGTH, VOCABULARY, Gpt, recorded


class Siamese(Gpt):
    """Called twice; one loss of both results."""

    def loss(self):
        first, second = (torch.randint(VOCABULARY, (BATCH, LENGTH // part)) for part in (1, 2))
        return F.cosine_embedding_loss(self(first).mean(1), self(second).mean(1), torch.ones(BATCH))


class Shared(Gpt):
    """Blocks that take what they have made themselves, in turn and again."""

    def forward(self, words):
        x = self.tokens(words)
        scale = torch.linspace(0.5, 1.5, x.numel()).view_as(x)
        for place in (0, 1, 0, 2, 2, 2, 1, 3):
            x = self.blocks[place](x, scale)
        return self.head(x)


class Cell(nn.Module):
    """Joins what it is called with, so its convolution keeps that joined; it multiplies the second state, and keeps it."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x, hidden, state):
        forget, new = self.gates(torch.cat([x, hidden], 1)).chunk(2, 1)
        state = forget.sigmoid() * state + new.tanh()
        return state.tanh(), state


class ConvLstm(nn.Module):
    """Two cells, called in turn with what they have made before."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(2))

    def loss(self):
        states = [(torch.zeros(4, 8, 24, 24), torch.zeros(4, 8, 24, 24)) for _ in self.cells]
        for _ in range(6):
            x = torch.randn(4, 8, 24, 24)
            for place, cell in enumerate(self.cells):
                states[place] = cell(x, *states[place])
                x = states[place][0]
        return x.square().mean()


@pytest.mark.parametrize("chosen", [("cells.0",), ("cells.0", "cells.1")])
def test_what_cells_are_called_with_goes_with_their_second_run_or_where_autograd_lets_go(chosen):
    predicted, measured, losses = predicted_and_measured(ConvLstm, 1, chosen, bf16=False)

    assert losses[0] == losses[1]
    assert measured == predicted


@pytest.mark.parametrize(
    ("kind", "num_micro_batches", "chosen"),
    [(Siamese, 1, (0,)), (Siamese, 2, (0, 1, 3)), (Shared, 1, (2,)), (Shared, 2, (0, 1, 2, 3))],
)
def test_what_each_call_saves_is_set_free_and_made_again(kind, num_micro_batches, chosen):
    predicted, measured, losses = predicted_and_measured(kind, num_micro_batches, chosen, bf16=False)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=1e-3)


def test_weights_that_autocast_has_cast_are_cast_again_in_each_second_run():
    """Calls behind the first find them in autocast's cache, which is there no more when they run again."""
    predicted, measured, losses = predicted_and_measured(Shared, 1, (0, 1, 2, 3), bf16=True)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=2e-3)


def test_so_are_biases_which_nothing_keeps_for_the_backward():
    """Only autocast's cache has had them: a later call makes in its second run all that the first one has, but for the copy
    of the weight, which is counted where autograd keeps it."""
    run, _ = recorded(ConvLstm, 1, True)
    first, *later = (s for s in captured_step(run).segments if (s.phase, s.unit) == ("forward", "cells.1"))
    weight_bytes = 2 * 16 * 16 * 3 * 3

    assert {sum(first.growth.values()) - sum(each.growth.values()) for each in later} == {weight_bytes}


class Depth(Gpt):
    """One block, all depths of which share its weights."""

    def __init__(self):
        super().__init__(1)

    def forward(self, words):
        x = self.tokens(words)
        for place in range(5):
            x = self.blocks[0](x, torch.linspace(0.5, 1.5, x.numel()).view_as(x) + place)
        return self.head(x)


class Held(Depth):
    """The same, registered by itself, and called from a plain list."""

    def __init__(self):
        super().__init__()
        self.block = self.blocks[0]
        del self.blocks
        self.blocks = [self.block] * 5


def test_a_block_that_a_plain_list_holds_is_recomputed_call_by_call():
    predicted, measured, losses = predicted_and_measured(Held, 1, ("block",), False)

    assert losses[0] == losses[1]
    assert measured == predicted
    assert measured < 0.6 * recorded(Held, 1, False)[0].ranks[0].traced_step.peak_allocated_bytes


@pytest.mark.parametrize(
    ("kind", "num_micro_batches", "chosen", "again"),
    [
        (Siamese, 1, (0, 2), False),
        (Shared, 2, (0, 1, 2, 3), False),
        (Shared, 1, (0, 2, "head"), True),
        (Depth, 2, (0,), False),
        (ConvLstm, 1, ("cells.0", "cells.1"), False),
    ],
)
def test_what_each_call_saves_waits_on_disk_until_that_calls_backward(kind, num_micro_batches, chosen, again):
    changes = {"recompute": again, "activation_tier": "disk"}
    predicted, measured, losses = predicted_and_measured(kind, num_micro_batches, chosen, False, **changes)

    assert losses[0] == losses[1]
    assert measured == predicted


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("kind", "chosen", "bits"),
    [
        (Gpt, (0, 1, 2, 3, "head"), 8),
        (Siamese, (0, 2), 8),
        (Shared, (0, 1, 2, 3), 2),
        (Depth, (0,), 8),
        (Depth, (0,), 4),
        (ConvLstm, ("cells.0", "cells.1"), 4),
    ],
)
def test_what_each_call_saves_is_in_codes_until_that_calls_backward(kind, chosen, bits, bf16):
    plan = {"recompute": False, "activation_bits": bits}
    predicted, measured, _ = predicted_and_measured(kind, 1, chosen, bf16, **plan)

    assert measured == predicted


@given(st.floats(1e7, 1e10), st.floats(1e7, 1e10))
@settings(max_examples=10, deadline=None)
def test_each_call_is_written_and_read_once(read, write):
    step = captured_step(recorded_shared())
    units = tuple(
        UnitPlan(name=f"blocks.{n}", zero_stage=0, recompute=False, activation_tier="disk") for n in range(4)
    )
    schedule = write_schedule(make_plan(1, units=units), step.units)
    bandwidth = TierBandwidth(read_bytes_per_s=read, write_bytes_per_s=write)
    played = simulate(step, schedule, None, transfers=TransferTimes({Lane.DISK: bandwidth}, "a test"))
    moved = Activations(step, Stretches(()), away=units_away(schedule)).moves.absences
    sent_bytes = sum(absence.storages.size_bytes for absence in moved)
    read_bytes = sum(absence.storages.size_bytes for absence in moved if absence.is_away)

    assert {absence.written_by for absence in moved} >= {("blocks.2", call) for call in range(3)}
    on_disk = [i.end_s - i.start_s for i in played.lanes.intervals if i.lane is Lane.DISK]
    assert sum(on_disk) == pytest.approx(sent_bytes / write + read_bytes / read)


@cache
def recorded_shared():
    return recorded(Shared, 1, False)[0]


def predicted_and_measured(kind, num_micro_batches, chosen, bf16, **changes):
    """Peaks in bytes, and the losses of the plain and the applied run; `changes`: of the chosen units, recomputed unless they
    say otherwise."""
    run, losses = recorded(kind, num_micro_batches, bf16)
    step = captured_step(run)
    names = (f"blocks.{n}" if isinstance(n, int) else n for n in chosen)
    units = tuple(UnitPlan(name=name, zero_stage=0, **{"recompute": True, **changes}) for name in names)
    plan = make_plan(1, units=units)
    predicted = simulate(step, write_schedule(plan, step.units), None, transfers=DISK).prediction()
    applied, losses_applied = recorded(kind, num_micro_batches, bf16, plan)
    return predicted.peak_bytes, applied.ranks[0].traced_step.peak_allocated_bytes, (losses, losses_applied)
