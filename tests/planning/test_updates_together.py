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
    assert applied.ranks[0].traced_step.peak_allocated_bytes == predicted.total_bytes


def test_updated_unit_by_unit_a_step_holds_the_temporaries_of_one():
    run, losses = recorded(OneWord, 1, False, make_optimizer=adamw(foreach=True))
    step = captured_step(run)
    plan = make_plan(1, 0, update_by_unit=True)
    predicted = simulate(step, write_schedule(plan, step.units), None)
    applied, measured_losses = recorded(OneWord, 1, False, plan, adamw(foreach=True))

    assert measured_losses == losses
    assert predicted.peak.total_bytes < 0.9 * step.peak_bytes
    assert applied.ranks[0].traced_step.peak_allocated_bytes == predicted.peak.total_bytes


def in_groups(parameters):
    """One for each of the first layers, and one of all others; with weight decay RMSprop has two temporaries of each."""
    parameters = list(parameters)
    groups = [{"params": parameters[first : first + 4]} for first in range(0, 24, 4)]
    groups.append({"params": parameters[24:]})
    return torch.optim.RMSprop(groups, lr=1e-3, weight_decay=0.1, foreach=True)


def asgd(parameters):
    """Which makes a number of each parameter too."""
    return torch.optim.ASGD(parameters, lr=1e-3, foreach=True)


def rprop(parameters):
    """Which goes from one parameter to the next inside its operators on all."""
    return torch.optim.Rprop(parameters, lr=1e-3, foreach=True)


@pytest.mark.parametrize("make_optimizer", [in_groups, asgd, rprop])
@pytest.mark.parametrize("place", [{"update_by_unit": True}, {"optimizer_tier": "disk"}])
def test_a_units_update_allocates_what_its_own_parameters_had(make_optimizer, place):
    """Not the unit's share of what the largest group had, with which peaks were predicted up to 8.5 % too low."""
    run, losses = recorded(OneWord, 1, False, make_optimizer=make_optimizer)
    step = captured_step(run)
    plan = make_plan(1, 0, **place)
    predicted = simulate(step, write_schedule(plan, step.units), None, transfers=DISK)
    applied, measured_losses = recorded(OneWord, 1, False, plan, make_optimizer)

    assert measured_losses == losses
    assert applied.ranks[0].traced_step.peak_allocated_bytes == predicted.peak.total_bytes


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
