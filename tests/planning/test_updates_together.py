"""Optimizers that update all parameters together (foreach, the default on CUDA): what they allocate for it, unit by unit."""

import pytest
import torch
import torch.nn.functional as F

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import DISK, VOCABULARY, Gpt, recorded


class OneWord(Gpt):
    """So little of it is activations that its peak is in the optimizer step."""

    def loss(self):
        words = torch.randint(VOCABULARY, (1, 1))
        return F.cross_entropy(self(words).flatten(0, 1), words.flatten())


def adamw(*, foreach):
    return lambda parameters: torch.optim.AdamW(parameters, foreach=foreach)


@pytest.mark.parametrize("foreach", [True, False])
def test_what_a_units_update_allocates_is_of_that_unit(foreach):
    """With its state on disk each unit is updated by itself. Of an optimizer that updates all at once, all parameters'
    temporaries were foretold for it."""
    run, losses = recorded(OneWord, 1, False, make_optimizer=adamw(foreach=foreach))
    step = captured_step(run)
    plan = make_plan(1, 0, optimizer_tier="disk")
    predicted = simulate(step, write_schedule(plan, step.units), None, transfers=DISK).peak
    applied, measured_losses = recorded(OneWord, 1, False, plan, adamw(foreach=foreach))

    assert step.updates_together == foreach
    assert measured_losses == losses
    assert predicted.position == "optimizer step"
    measured_bytes = applied.ranks[0].traced_step.peak_allocated_bytes
    assert measured_bytes == pytest.approx(
        predicted.total_bytes, abs=64
    )  # numbers that Python hands to operators


def test_updated_unit_by_unit_a_step_holds_the_temporaries_of_one():
    run, losses = recorded(OneWord, 1, False, make_optimizer=adamw(foreach=True))
    step = captured_step(run)
    plan = make_plan(1, 0, update_by_unit=True)
    predicted = simulate(step, write_schedule(plan, step.units), None)
    applied, measured_losses = recorded(OneWord, 1, False, plan, adamw(foreach=True))

    assert measured_losses == losses
    assert predicted.peak.total_bytes < 0.9 * step.peak_bytes
    measured_bytes = applied.ranks[0].traced_step.peak_allocated_bytes
    assert measured_bytes == pytest.approx(predicted.peak.total_bytes, abs=64)


def test_the_advised_plan_updates_unit_by_unit_where_that_alone_makes_it_fit():
    run, _ = recorded(OneWord, 1, False, make_optimizer=adamw(foreach=True))
    plans = {share: memadvisor.advise(run, memory=share).plans[0] for share in ("90%", "100%")}
    assert plans["90%"].fits and plans["90%"].plan.update_by_unit
    assert (
        not plans["90%"].plan.recomputed_units and "updates units one after another" in plans["90%"].plan.why
    )
    assert not plans["100%"].plan.update_by_unit


def test_no_plan_updates_unit_by_unit_what_is_updated_one_after_another_anyway():
    run, _ = recorded(OneWord, 1, False, make_optimizer=adamw(foreach=False))
    assert not captured_step(run).updates_together
    assert not any(ranked.plan.update_by_unit for ranked in memadvisor.advise(run, memory="90%").plans)
