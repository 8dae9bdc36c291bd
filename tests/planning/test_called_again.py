"""Units that are called several times before the backward: predicted from the plain run, applied, and measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import BATCH, LENGTH, VOCABULARY, Gpt, recorded


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


def predicted_and_measured(kind, num_micro_batches, chosen, bf16):
    """Peaks in bytes, and the losses of the plain and the applied run."""
    run, losses = recorded(kind, num_micro_batches, bf16)
    step = captured_step(run)
    names = (f"blocks.{n}" if isinstance(n, int) else n for n in chosen)
    units = tuple(UnitPlan(name=name, zero_stage=0, recompute=True) for name in names)
    plan = make_plan(1, units=units)
    predicted = simulate(step, write_schedule(plan, step.units), None).prediction()
    applied, losses_applied = recorded(kind, num_micro_batches, bf16, plan)
    return predicted.peak_bytes, applied.ranks[0].traced_step.peak_allocated_bytes, (losses, losses_applied)
