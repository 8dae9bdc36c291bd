"""Modules of the model that its blocks are handed, and call: blocks run again with them, predicted from the plain run."""

import pytest
import torch.nn.functional as F
from torch import nn

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES
from tests.engines.trainings import make_plan
from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import DISK, WIDTH, Gpt, recorded


class Handed(Gpt):
    """`place`: where in its forward a block calls the model's own layer, which has the width of a block."""

    class Block(nn.Module):
        def __init__(self, place):
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
            self.down, self.dropout, self.place = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1), place

        def forward(self, x, shared):
            y = shared(x) if self.place == "first" else self.norm(x)
            y = self.down(F.gelu(self.up(y)))
            return x + self.dropout(shared(y)) if self.place == "middle" else shared(x + y)

    place = "middle"

    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(self.Block(self.place) for _ in range(4))

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x, self.shared)
        return self.head(x)


class First(Handed):
    place = "first"


class Last(Handed):
    """The model calls it too."""

    place = "last"

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x, self.shared)
        return self.head(self.shared(x))


class Adapted(Handed):
    """What they are handed is made of modules, and a block itself."""

    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleList(self.shared if n == 0 else type(self).adapter() for n in range(2))
        del self.shared

    @staticmethod
    def adapter():
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, words):
        x = self.tokens(words)
        for place, block in enumerate(self.blocks):
            x = block(x, self.adapters[place % 2])
        return self.head(x)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("kind", [Handed, First, Last, Adapted])
def test_blocks_run_again_with_what_they_are_handed(kind, num_micro_batches):
    predicted, measured, losses = predicted_and_measured(kind, num_micro_batches, (0, 1, 3), bf16=False)

    assert losses[0] == losses[1]
    assert measured == predicted
    assert (
        measured < 0.8 * recorded(kind, num_micro_batches, False)[0].ranks[0].traced_step.peak_allocated_bytes
    )


@pytest.mark.parametrize("kind", [Handed, Last])
def test_what_blocks_keep_is_gone_behind_the_next_block_and_not_behind_what_it_is_lent(kind):
    """Units are named in order of execution, as `advise` names them: of what is lent, by calls that are not."""
    run, losses = recorded(kind, 1, False)
    step = captured_step(run)
    away = {f"blocks.{n}" for n in (0, 1, 3)}
    units = tuple(
        UnitPlan(
            name=u.name, zero_stage=0, recompute=False, activation_tier="disk" if u.name in away else "device"
        )
        for u in step.units
    )
    plan = make_plan(1, units=units)
    predicted = simulate(step, write_schedule(plan, step.units), None, transfers=DISK).peak_bytes
    applied, losses_applied = recorded(kind, 1, False, plan)

    assert losses == losses_applied
    assert applied.ranks[0].traced_step.peak_allocated_bytes == predicted
    assert [u.name for u in step.units if u.name.startswith("blocks")] == [f"blocks.{n}" for n in range(4)]


@pytest.mark.parametrize("kind", [Handed, First, Last])
def test_each_block_is_one_piece_and_lends_nothing_to_others(kind):
    step = captured_step(recorded(kind, 1, False)[0])
    lent = {(s.phase, s.unit) for s in step.segments if {"shared.0", "shared.1"} <= {*s.lenders}}
    ended = {s.unit: {*s.loans_ended} for s in step.segments if s.loans_ended}
    own = [s.unit for s in step.segments if s.phase == "forward" and s.unit == "shared.1"]
    blocks = [s.unit for s in step.segments if s.phase == "backward" and (s.unit or "").startswith("blocks")]

    assert lent == {(phase, f"blocks.{n}") for phase in ("forward", "backward") for n in range(4)}
    assert blocks == [f"blocks.{n}" for n in (3, 2, 1, 0)]
    assert ended == {"blocks.0": {"shared.0", "shared.1"}}
    assert len(own) == (kind is Last)


def test_what_follows_the_last_of_a_units_backwards_follows_the_loan_that_comes_after_its_own():
    step = captured_step(recorded(Last, 1, False)[0])
    own = [edges for s, edges in zip(step.segments, step.edges, strict=True) if s.unit == "shared.1"]

    assert own == [(True, True), (True, False)]  # its forward, its backward


def test_calls_stay_apart_where_backwards_do_not_match_them():
    """What a block was lent for its second result, the loss does not need."""

    class Unneeded(Handed):
        class Block(Handed.Block):
            def forward(self, x, shared):
                return super().forward(x, shared), shared(x)

        def forward(self, words):
            x = self.tokens(words)
            for block in self.blocks:
                x, _ = block(x, self.shared)
            return self.head(x)

    step = captured_step(recorded(Unneeded, 1, False)[0])
    assert sum(s.unit == "shared.1" and s.phase == "forward" for s in step.segments) == 8


def test_what_comes_ahead_of_a_unit_that_is_called_once_more_at_the_end_goes_with_the_forward():
    """Behind the model's own call of a layer comes, in a plan's order, the second block, which nobody asks for."""
    step = captured_step(recorded(Last, 1, False)[0])
    units = tuple(UnitPlan(name=unit.name, zero_stage=3, recompute=False) for unit in step.units)
    plan = make_plan(2, units=units, overlap=True, gather_depth=1)
    played = simulate(step, write_schedule(plan, step.units), TIMES)
    backward = next(place for place, s in enumerate(step.segments) if s.phase == "backward")
    held = [m.by_category_bytes["parameter"] for m in played.moments if m.segment >= backward]

    first, before = held[0], min(m.by_category_bytes["parameter"] for m in played.moments)
    assert first == before
