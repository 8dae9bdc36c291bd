"""What units are called with, and autograd does not keep: it goes when they have run again for the last time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import BATCH, LENGTH, WIDTH, Gpt, recorded

NUM_BLOCKS = 5


class Joining(nn.Module):
    """Keeps what it makes of its arguments, and not these."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, beside):
        return self.down(F.gelu(torch.cat([x, -beside], -1)))


class Chain(Gpt):
    """The first two blocks take what the first layer has made."""

    block = Joining

    def __init__(self):
        super().__init__()
        self.tokens = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def loss(self):
        x = first = self.tokens(torch.randn(BATCH, LENGTH, WIDTH))
        for number, block in enumerate(self.blocks):
            x = block(x, first if number < 2 else x)
        return self.head(x).square().mean()


@pytest.mark.parametrize(
    "stretches",
    [
        [(0, 4)],
        [(0, 1), (2, 4)],
        [(0, 4), (0, 2)],
        [(0, 4), (1, 2)],
        [(0, 4), (2, 4)],
        [(0, 4), (0, 3), (1, 2), (0, 0)],
        [(1, 3), (4, 4)],
    ],
)
def test_a_stretch_lets_go_of_what_its_units_are_called_with_as_each_has_run(stretches):
    run, losses = recorded(Chain, 1, bf16=False)
    step = captured_step(run)
    pairs = [(f"blocks.{first}", f"blocks.{last}") for first, last in stretches]
    alone = {first for first, last in pairs if first == last}
    units = tuple(UnitPlan(name=u.name, zero_stage=0, recompute=u.name in alone) for u in step.units)
    plan = make_plan(1, units=units, stretches=tuple(pair for pair in pairs if pair[0] != pair[1]))
    predicted = simulate(step, write_schedule(plan, step.units), None).peak_bytes
    applied, losses_applied = recorded(Chain, 1, bf16=False, plan=plan)

    assert losses_applied == losses
    assert applied.ranks[0].traced_step.peak_allocated_bytes == predicted


class Feeding(Joining):
    """Has parts, none of which is called with what the block is."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.down = nn.Sequential(*layers)


class Parted(Chain):
    block = Feeding


def test_a_unit_with_parts_lets_go_of_what_it_is_called_with_when_it_has_run_again():
    run, losses = recorded(Parted, 1, bf16=False)
    step = captured_step(run)
    parts = {unit: options.lower[-1].modules for (unit, _), options in step.parted.items()}
    units = tuple(
        UnitPlan(name=u.name, zero_stage=0, recompute=u.name in parts, parts=parts.get(u.name, ()))
        for u in step.units
    )
    plan = make_plan(1, units=units)
    predicted = simulate(step, write_schedule(plan, step.units), None).peak_bytes
    applied, losses_applied = recorded(Parted, 1, bf16=False, plan=plan)

    assert len(parts) == NUM_BLOCKS
    assert losses_applied == losses
    assert applied.ranks[0].traced_step.peak_allocated_bytes == predicted
