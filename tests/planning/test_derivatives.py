"""Losses that are made of a derivative: plans that recompute are predicted from the plain run, applied, and measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.planning.advise import advise
from memadvisor.write_schedule import write_schedule
from tests.analyzers.test_derivatives import BLOCKS, Forces, Potential
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import recorded


class Saturating(nn.Module):
    """Saves what it returns, which the next block takes; and a mean, whose backward asks for nothing."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        hidden = F.silu(self.up(self.norm(x)))
        return torch.tanh(x + self.down(hidden) + x.mean(0))


class Penalised(Potential):
    """A critic that sees three batches, and whose slope at the last is held near 1 (WGAN-GP)."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Saturating(32) for _ in BLOCKS)

    def loss(self):
        real, made = torch.rand(256, 3), torch.rand(384, 3)
        mixed = torch.rand(512, 3, requires_grad=True)
        difference = self(made).mean() - self(real).mean()
        (slope,) = torch.autograd.grad(self(mixed).sum(), mixed, create_graph=True)
        return difference + (slope.norm(dim=1) - 1).square().mean()


class Learning(Penalised):
    """One inner step of meta-learning, and the loss of what it leads to."""

    def loss(self):
        inner = self(torch.rand(512, 3)).square().mean()
        slopes = torch.autograd.grad(inner, list(self.parameters()), create_graph=True)
        own = zip(self.named_parameters(), slopes, strict=True)
        fast = {name: value - 0.1 * slope for (name, value), slope in own}
        return functional_call(self, fast, (torch.rand(512, 3),)).square().mean()


def plan_of(step, chosen):
    units = (UnitPlan(name=unit.name, zero_stage=0, recompute=unit.name in chosen) for unit in step.units)
    return make_plan(1, policy="chosen", units=tuple(units))


@pytest.mark.parametrize(
    ("kind", "num_micro_batches", "chosen"),
    [
        (Potential, 1, BLOCKS),
        (Potential, 2, BLOCKS[:2]),
        (Forces, 2, BLOCKS),
        (Forces, 1, BLOCKS[1:2]),
        (Penalised, 1, BLOCKS[:2]),
        (Learning, 2, BLOCKS),
        (Learning, 1, BLOCKS[2:]),
    ],
)
def test_units_run_again_for_the_derivative_and_for_the_loss(kind, num_micro_batches, chosen):
    """A copy goes when the derivative has asked for it, but for what its graph saves. Of a critic's last block the slope
    is known to come in the middle, so it is left as it is."""
    plain, losses = recorded(kind, num_micro_batches, bf16=False)
    step = captured_step(plain)
    plan = plan_of(step, chosen)
    ours, again = recorded(kind, num_micro_batches, bf16=False, plan=plan)
    peak = simulate(step, write_schedule(plan, step.units), None).peak
    measured = ours.ranks[0].traced_step.peak_allocated_bytes

    assert losses == again
    assert set(chosen) <= set(step.recomputable)
    assert measured != plain.ranks[0].traced_step.peak_allocated_bytes
    assert peak.total_bytes == pytest.approx(measured, rel=2e-3)


def test_a_plan_for_forces_recomputes():
    plain, _ = recorded(Forces, 1, bf16=False)
    advice = advise(plain, memory_bytes=int(0.93 * plain.ranks[0].traced_step.peak_allocated_bytes))
    (first, *_) = advice.plans

    assert first.fits
    assert {unit.name for unit in first.plan.units if unit.recompute} & set(BLOCKS)
    assert not [note for note in advice.notes if "derivative" in note]
