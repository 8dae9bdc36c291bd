"""Blocks that a loop calls by one attribute: seen in the first step, predicted from the plain run, applied, and measured."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.kept_calls import keepable_calls
from memadvisor.cost.simulate import simulate
from memadvisor.planning.sparing_calls import SparedCalls
from memadvisor.planning.stretches import nested_with
from memadvisor.planning.way import Way
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import recorded

CHANNELS = 8


class Field(nn.Module):
    """With a buffer that each call changes, and dropout."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.up, self.down = (
            nn.Conv2d(CHANNELS + 1, CHANNELS, 3, padding=1),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, time, x):
        y = self.up(torch.cat([torch.full_like(x[:, :1], time), self.norm(x).relu()], 1))
        return self.down(self.dropout(y.tanh()))


class Solver(nn.Module):
    """Steps of Heun's method."""

    num_steps = 3

    def __init__(self):
        super().__init__()
        self.stem, self.field = nn.Conv2d(1, CHANNELS, 3), Field()

    def forward(self, x):
        x = self.stem(x)
        for place in range(self.num_steps):
            first = self.field(float(place), x)
            x = x + 0.5 * (first + self.field(place + 1.0, x + first))
        return x

    def loss(self):
        return self(torch.randn(4, 1, 20, 20)).square().mean()


class Decoder(nn.Module):
    """A step that attends, called for each token."""

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.cell = nn.Embedding(20, 16), nn.LSTMCell(32, 16)
            self.query, self.out = nn.Linear(16, 16), nn.Linear(32, 20)

        def forward(self, word, hidden, state, given):
            weights = torch.bmm(given, self.query(hidden).unsqueeze(2)).softmax(1)
            taken = (weights * given).sum(1)
            hidden, state = self.cell(torch.cat([self.words(word), taken], 1), (hidden, state))
            return self.out(torch.cat([hidden, taken], 1)), hidden, state

    def __init__(self):
        super().__init__()
        self.given, self.step = nn.Linear(4, 16), self.Step()

    def loss(self):
        words, given = torch.randint(20, (32, 7)), self.given(torch.randn(32, 24, 4))
        hidden, found = given.mean(1), []
        state = torch.zeros_like(hidden)
        for place in range(6):
            result, hidden, state = self.step(words[:, place], hidden, state, given)
            found.append(result)
        return F.cross_entropy(torch.stack(found, 1).flatten(0, 1), words[:, 1:].flatten())


class Chunked(nn.Module):
    """A whole model that is asked about its batch in chunks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3 if not place else 64, 64) for place in range(4))
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.out(x)

    def loss(self):
        x = torch.randn(512, 3)
        return torch.cat([self(x[at : at + 128]) for at in range(0, 512, 128)]).square().mean()


UNITS = {Solver: "field", Decoder: "step", Chunked: ""}


@pytest.mark.parametrize("kind", UNITS)
def test_it_is_a_unit_that_each_call_of_may_run_again(kind):
    step = captured_step(recorded(kind, 1, False)[0])

    assert UNITS[kind] in step.recomputable
    assert UNITS[kind] in step.called_again
    assert not [unit.name for unit in step.units if unit.name.startswith(f"{UNITS[kind] or 'layers'}.")]


@pytest.mark.parametrize(
    ("kind", "num_micro_batches", "bf16"),
    [(kind, number, False) for kind in UNITS for number in (1, 2)] + [(Solver, 1, True), (Chunked, 1, True)],
)
def test_each_call_runs_again_by_itself(kind, num_micro_batches, bf16):
    predicted, measured, losses = predicted_and_measured(kind, num_micro_batches, (UNITS[kind],), bf16)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=2e-3 if bf16 else 0)
    assert (
        measured < 0.9 * recorded(kind, num_micro_batches, bf16)[0].ranks[0].traced_step.peak_allocated_bytes
    )


@pytest.mark.parametrize("kept", [(5,), (1, 3), (0, 1, 2, 4)])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_calls_that_a_plan_keeps_do_not_run_again(num_micro_batches, kept):
    predicted, measured, losses = predicted_and_measured(
        Solver, num_micro_batches, ("field",), False, kept_calls=kept
    )

    assert losses[0] == losses[1]
    assert measured == predicted


def test_so_it_is_of_calls_that_pass_on_what_they_keep():
    predicted, measured, losses = predicted_and_measured(Decoder, 1, ("step",), False, kept_calls=(3, 4, 5))

    assert losses[0] == losses[1]
    assert measured == predicted


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_no_choice_of_calls_within_the_budget_keeps_more_of_them_than_the_last_ones(share):
    step = captured_step(recorded(Solver, 1, False)[0])

    def play(nested):
        units = Way(0, True, 0, 0).arranged(step, nested, "device").units
        return simulate(step, write_schedule(make_plan(1, units=units), step.units), None).prediction()

    def peak_bytes(*calls):
        return play(nested_with(frozenset({"field"}), (), {}, kept_calls={"field": calls})).peak_bytes

    low, high = peak_bytes(), play(nested_with(frozenset(), (), {})).peak_bytes
    budget_bytes = round(low + share * (high - low))
    found = dict(SparedCalls(step, play).of(frozenset({"field"}), budget_bytes).kept_calls)["field"]

    assert keepable_calls(step)["field"] == 6
    assert found == tuple(range(6 - len(found), 6))
    assert peak_bytes(*found) <= budget_bytes
    assert all(peak_bytes(*calls) > budget_bytes for calls in combinations(range(6), len(found) + 1))
