"""Optimizers that update all parameters together, asked for one unit after another: the same in every bit."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.engines.trainings import applied, make_plan
from tests.engines.updates.test_fused_updates import new, steps

KINDS = {
    "AdamW": lambda groups, **how: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, **how),
    "SGD": lambda groups, **how: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    "Adagrad": lambda groups, **how: torch.optim.Adagrad(groups, lr=1e-2, **how),
}
BY_UNIT = make_plan(1, update_by_unit=True)


def trained(kind, plan, **how):
    """Losses, both state dicts, how often operators over lists ran, and the engine's warnings."""
    model, optimizer = new(KINDS[kind], **how)
    notes = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        applied(plan, note=lambda level, text: notes.append(text)),
        torch.profiler.profile(activities=activities) as seen,
    ):
        losses = steps(model, optimizer, 4)
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    num_calls = sum(event.count for event in seen.key_averages() if event.key.startswith("aten::_foreach_"))
    return losses, states, num_calls, notes


@pytest.mark.parametrize("kind", KINDS)
def test_losses_weights_and_states_are_those_of_one_update_of_all(kind):
    losses, states, num_calls, notes = trained(kind, BY_UNIT, foreach=True)
    usual_losses, usual_states, num_usual_calls, _ = trained(kind, make_plan(1), foreach=True)

    assert losses == usual_losses and losses[-1] != losses[0] and not notes
    torch.testing.assert_close(states, usual_states, rtol=0, atol=0)
    assert list(states[1]["state"]) == list(usual_states[1]["state"])
    assert num_calls > num_usual_calls > 0


def test_updates_of_one_parameter_after_another_are_left_alone_and_that_is_said_once():
    losses, _, num_calls, notes = trained("AdamW", BY_UNIT)
    usual_losses, _, num_usual_calls, _ = trained("AdamW", make_plan(1))  # calls that clip gradients
    assert (losses, num_calls) == (usual_losses, num_usual_calls)
    assert [note for note in notes if "update_by_unit has no effect on AdamW" in note] == notes[:1] == notes


def test_which_update_runs_is_decided_by_the_group_and_not_by_the_unit(monkeypatch):
    """As on GPUs, where one parameter of a class of its own has all of its group updated one after another."""
    from memadvisor.engines.updates import updates_by_unit

    asked = []

    def decide(parameters, differentiable, use_fused):
        asked.append(len(parameters))
        return False, len(parameters) < 5  # a unit alone would be updated together

    monkeypatch.setattr(updates_by_unit, "_default_to_fused_or_foreach", decide)
    model, _ = new(KINDS["AdamW"])
    optimizer = KINDS["AdamW"](model.parameters())
    with applied(BY_UNIT) as plan:
        steps(model, optimizer, 1)
    assert plan is not None and set(asked) == {len(list(model.parameters()))}


def test_parameters_of_no_unit_are_updated_too():
    """The script's own step updates what no unit has."""
    extra = torch.nn.Parameter(torch.ones(3))
    model, _ = new(KINDS["SGD"])
    optimizer = KINDS["SGD"]([*model.parameters(), extra], foreach=True)
    with applied(BY_UNIT):
        extra.grad = torch.ones(3)
        steps(model, optimizer, 1)
    assert (extra != 1).all()
