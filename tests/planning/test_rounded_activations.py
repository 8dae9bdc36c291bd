"""Activations in a few bits: predicted from the plain run, applied, and measured."""

from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.planning.advise import advise
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import Block, UNet, recorded


class Gpt(nn.Module):
    """With logits that weigh more than what one block's forward has at a time, as in life."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(1500, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 1500, bias=False)

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x, torch.ones(x.shape))
        return self.head(x)

    def loss(self):
        words = torch.randint(1500, (8, 64))
        return F.cross_entropy(self(words).flatten(0, 1), words.flatten())


@pytest.mark.parametrize(
    ("kind", "num_micro_batches", "bf16", "bits", "chosen", "again"),
    [
        (Gpt, 1, False, 8, ("*",), ()),
        (Gpt, 2, False, 4, ("blocks.*",), ("blocks.2",)),
        (Gpt, 1, True, 2, ("*",), ()),
        (UNet, 1, False, 8, ("*",), ()),
        (UNet, 1, False, 2, ("down", "deep"), ("up",)),
    ],
)
def test_the_peak_is_what_the_simulator_said(kind, num_micro_batches, bf16, bits, chosen, again):
    """To the byte, but for running statistics, whose copies a recomputed unit lets go of within its backward."""
    run, _ = recorded(kind, num_micro_batches, bf16)
    step = captured_step(run)
    units = tuple(
        UnitPlan(
            name=unit.name,
            zero_stage=0,
            recompute=unit.name in again,
            activation_bits=bits
            if unit.name not in again and any(fnmatch(unit.name, pattern) for pattern in chosen)
            else None,
        )
        for unit in step.units
    )
    plan = make_plan(1, 0, "chosen", units)
    predicted = simulate(step, write_schedule(plan, step.units), None)
    applied, _ = recorded(kind, num_micro_batches, bf16, plan)
    measured = applied.ranks[0].traced_step.peak_allocated_bytes
    assert 0 <= predicted.peak.total_bytes - measured <= (100 if again else 0)
    assert measured < 0.95 * run.ranks[0].traced_step.peak_allocated_bytes
    assert step.rounding_cost is not None and predicted.step_time_s > step.step_time_s


def test_advise_shows_what_rounding_would_give_and_never_chooses_it():
    """The first plan with the activations of all blocks in few bits, in place of what is recomputed of them."""
    run, _ = recorded(Gpt, 1, False)
    step = captured_step(run)
    peak_bytes = run.ranks[0].traced_step.peak_allocated_bytes
    for memory_bytes in (2**40, peak_bytes * 7 // 10):
        advice = advise(run, memory_bytes=memory_bytes)
        assert not any(ranked.plan.rounded_to for ranked in advice.plans)
        shown = {each.option: each for each in advice.lossy if "compress" in each.option}
        for bits in (8, 4, 2):
            played = simulate(step, write_schedule(make_plan(1, activation_bits=bits), step.units), None)
            each = shown.get(f"--compress-activations {bits}")
            if each is None:  # it gains nothing
                assert played.peak.total_bytes >= advice.plans[0].prediction.peak_bytes
                assert played.step_time_s >= advice.plans[0].prediction.step_time_s
                continue
            assert (each.peak_bytes, each.step_time_s) == (played.peak.total_bytes, played.step_time_s)
        assert shown or memory_bytes < peak_bytes
    untimed = replace(run.ranks[0], process=replace(run.ranks[0].process, rounding_element_s=None))
    unknown = advise(replace(run, ranks=(untimed,)), memory_bytes=2**40).lossy
    assert {each.step_time_s for each in unknown if "compress" in each.option} == {None}
